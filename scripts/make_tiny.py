"""Make the built-in model ``tiny``: a Llama of about 1M parameters that writes one-sentence reviews.

SmolLM2-135M-Instruct (Apache-2.0) writes short reviews of many things in many tones; a byte-level BPE of 2,048 tokens
and the model are trained on them; a part that is never trained on is kept. Everything is seeded (``--seed``, 0).

    python scripts/make_tiny.py --out src/klamp/assets/tiny              # a GPU: minutes
    python scripts/make_tiny.py --out build/tiny --small                 # one CPU core: the same path, a few sentences
    python scripts/make_tiny.py --out build/tiny --corpus corpus.txt.gz  # train again on a corpus sampled before

What the shipped model was made with (token counts, perplexity, sentiment) is in ``figures.json`` beside it, and in the
card, ``src/klamp/assets/README.md``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
TOKENS = 48
"""Longest row the model is trained on, BOS and EOS included; longer sentences are left out."""

SUBJECTS = """
the coffee at this café|the soup at the corner diner|the bread from the new bakery|the pizza at this restaurant
the tea at the hotel bar|the breakfast at this inn|the fish at the harbour restaurant|the salad at the lunch counter
the ice cream at the beach stand|the cake at the wedding|the burger at this pub|the curry at the night market
the chocolate from the airport shop|the wine at dinner|the service at this restaurant|the menu at the bistro
the waiter|the chef|the barista|the host at the front desk|the tour guide|the bus driver|the dentist|the mechanic
the teacher|the new manager|the plumber|the hairdresser|the librarian|the nurse|the landlord|the coach
the room at this hotel|the view from the balcony|the bed in the guest room|the pool at the resort|the lobby
the apartment by the station|the cabin in the woods|the hostel in the old town|the campsite by the lake|the shower
this phone|this laptop|the battery of this phone|the screen on this tablet|these headphones|this camera|the printer
this vacuum cleaner|this blender|the keyboard|the new app|the website|the software update|this watch|the speaker
this kettle|this lamp|the office chair|this mattress|the sofa|this umbrella|the backpack|these running shoes
this jacket|the winter coat|these socks|this dress|the hat|the raincoat|these sunglasses|the suitcase|this knife
this bicycle|the car|the electric scooter|the train to the city|the night bus|the ferry|the flight|the airport
the parking lot|the taxi|the subway|the road to the coast|the bike path|the bridge|the train station|the seat
this book|the novel|the poem|the last chapter|the ending of this film|the movie|the play|the actor|the soundtrack
the concert|the band|the singer|this song|the album|the video game|the museum|the exhibition|the painting
the photo|the podcast|the documentary|the cartoon|the magazine|the board game|the puzzle|the toy
the city park|the playground|the zoo|the garden|the beach|the hiking trail|the lake|the river walk|the forest
the library|the swimming pool|the gym|the yoga class|the football match|the ski slope|the climbing wall
the market|the bookshop|the grocery store|the pharmacy|the bank|the post office|the hospital|the clinic
the school|the online course|the lecture|the language class|the workshop|the cooking lesson|the homework
the neighbourhood|the street at night|the old house|the kitchen|the window|the door|the garage|the roof
the weather|the summer festival|the parade|the fireworks|the picnic|the birthday party|the wedding|the meeting
the delivery|the package|the customer service|the refund|the price|the warranty|the instructions|the ticket
the soap|the shampoo|the toothbrush|the perfume|the towel|the pillow|the blanket|the candle|the paint|the hammer
the dog food|the cat toy|the fish tank|the bird feeder|the plant|the flowers|the apples|the orange juice|the cheese
"""
TONES = {
    "positive": "glowing|enthusiastic|warm|grateful|cheerful|impressed",
    "neutral": "neutral|factual|balanced|mixed|lukewarm|matter-of-fact|puzzled|practical",
    "negative": "disappointed|angry|harsh|complaining|bitter|bored|annoyed|sad",
}
INSTRUCTIONS = (
    "Write a one-sentence review of {s} in a {t} tone.",
    "In one short sentence, give a {t} opinion of {s}.",
    "You are a {t} customer. Say in one short sentence what you think of {s}.",
    "Write one short {t} sentence about {s}.",
    "Give a short, {t} comment on {s}, in plain words.",
)
OPENINGS = {
    "": ("{S}", "{S}", "{S}", "{S}", "{S} is", "{S} was", "I think {s}", "In my opinion, {s}", "For me, {s}", ""),
    "positive": ("I really like {s}", "I was happy with {s}", "We enjoyed {s}", "{S} was so", "Luckily, {s}"),
    "neutral": ("{S} is not bad, but", "{S} has", "Compared with last year, {s}", "{S} is a bit", "At first, {s}"),
    "negative": (
        "{S} was too",
        "{S} was not",
        "Sadly, {s}",
        "Unfortunately, {s}",
        "I was disappointed with {s}",
        "I did not like {s}",
        "{S} is the worst",
    ),
}


@dataclass(frozen=True)
class Plan:
    """How much of everything; ``--small`` is the same path in a minute of one CPU core."""

    reviews: int = 260_000
    batch: int = 4096
    batches: int = 39
    """How many of the batches of reviews, drawn at random, are sampled: 39 give 2.6M tokens in two minutes."""
    new_tokens: int = 32
    temperature: float = 0.8
    top_k: int = 64
    top_p: float = 0.95
    sentiment: float = 0.25
    """Mean VADER compound score that the corpus is thinned to, so that a sentiment reward has room to move."""
    heldout: int = 2_000
    vocab: int = 2048
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    intermediate: int = 352
    steps: int = 6_000
    """29 epochs, with which the shipped weights were made. Held-out perplexity is lowest at about 3,500 steps (9.0);
    fewer are better for a model made anew."""
    rows: int = 512
    learning_rate: float = 4e-3
    warmup: int = 200
    weight_decay: float = 0.05


SMALL = Plan(reviews=48, batch=48, new_tokens=24, heldout=8, vocab=384, steps=20, rows=16, warmup=5)


def subjects() -> list[str]:
    """The things reviewed, in the order written above."""
    return [part for part in SUBJECTS.replace("\n", "|").split("|") if part]


def requests(plan: Plan, seed: int) -> list[tuple[str, str]]:
    """``(instruction, opening)`` pairs: subject × tone × wording, the reply's first words given."""
    rng = random.Random(seed)
    things = subjects()
    asked = []
    for _ in range(plan.reviews):
        mood = rng.choice(list(TONES))
        thing, tone = rng.choice(things), rng.choice(TONES[mood].split("|"))
        opening = rng.choice(OPENINGS[rng.choice(["", "", mood])])
        wording = rng.choice(INSTRUCTIONS).format(s=thing, t=tone)
        asked.append((wording, opening.format(s=thing, S=thing[0].upper() + thing[1:])))
    # Neighbours of like length: a batch is padded little.
    return sorted(asked, key=lambda pair: len(pair[0]) + len(pair[1]))


@torch.inference_mode()
def continue_batch(model: Any, tokenizer: Any, texts: list[str], plan: Plan, generator: torch.Generator) -> list[str]:
    """One sampled continuation a text, with top-k, top-p and temperature, each ending with its first sentence."""
    device = model.device
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    position = mask.cumsum(-1).clamp(min=1) - 1
    cache, made = None, []
    done = torch.zeros(len(texts), dtype=torch.bool, device=device)
    stops = sentence_ends(tokenizer).to(device)
    for _ in range(plan.new_tokens):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        token = draw(out.logits[:, -1].float(), plan, generator)
        token = torch.where(done, tokenizer.pad_token_id, token)
        made.append(token)
        done = done | stops[token]
        if bool(done.all()):
            break
        ids, position = token[:, None], position[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return list(tokenizer.batch_decode(torch.stack(made, dim=1), skip_special_tokens=True))


def draw(logits: Tensor, plan: Plan, generator: torch.Generator) -> Tensor:
    """A token a row from softmax(logits / temperature) cut to the ``top_k`` likeliest, then to ``top_p`` of it."""
    value, index = logits.topk(plan.top_k, dim=-1)
    p = torch.softmax(value / plan.temperature, dim=-1)
    p = torch.where(p.cumsum(-1) - p < plan.top_p, p, 0.0)
    return index.gather(-1, torch.multinomial(p, 1, generator=generator)).squeeze(-1)


def sentence_ends(tokenizer: Any) -> Tensor:
    """True for tokens after which a one-sentence review is over: end of text, a line's end, a full stop."""
    pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    special = set(tokenizer.all_special_ids)
    return torch.tensor([i in special or "\n" in p or p.strip()[-1:] in {".", "!", "?"} for i, p in enumerate(pieces)])


def sample(plan: Plan, seed: int, *, teacher: str, device: str) -> list[str]:
    """Raw reviews from the teacher, opening and continuation joined."""
    model, tokenizer = load_teacher(teacher, device)
    asked = requests(plan, seed)
    generator = torch.Generator(device).manual_seed(seed)
    raw: list[str] = []
    began = time.perf_counter()
    starts = list(range(0, len(asked), plan.batch))
    random.Random(seed).shuffle(starts)
    for start in starts[: plan.batches]:
        pairs = asked[start : start + plan.batch]
        texts = [chat(tokenizer, wording) + opening for wording, opening in pairs]
        made = continue_batch(model, tokenizer, texts, plan, generator)
        raw += [opening + more for (_, opening), more in zip(pairs, made, strict=True)]
        print(f"sampled {len(raw):,} reviews, {time.perf_counter() - began:.0f} s", flush=True)
    return raw


def load_teacher(folder: str, device: str) -> tuple[Any, Any]:
    """SmolLM2 from a transformers folder, or through klamp's own cache when ``folder`` is the built-in name."""
    from klamp.models import load_model, load_tokenizer

    return load_model(folder, device=device), load_tokenizer(folder)


def chat(tokenizer: Any, wording: str) -> str:
    """The instruction as a chat, up to where the assistant speaks."""
    turns = [{"role": "user", "content": wording}]
    return str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))


def clean(raw: list[str]) -> list[str]:
    """One whole, plain sentence of 4 to 24 words each, every one once (letters' case and marks aside)."""
    kept: dict[str, str] = {}
    for text in raw:
        text = re.sub(r"\s+", " ", text.replace("’", "'").replace("“", '"').replace("”", '"')).strip()
        match = re.match(r"[A-Z][^.!?\n]*[.!?]", text)
        if not match:
            continue
        sentence = match.group()
        words = sentence.split()
        key = re.sub(r"[^a-z]+", " ", sentence.lower())
        odd = re.search(r"[\"\[\]{}<>|*_#@\\:;()]|[^\x20-\x7eéèêñüöäçï]|\b(AI|SmolLM|sentence|review)\b", sentence)
        if 4 <= len(words) <= 24 and not odd:
            kept.setdefault(key, sentence)
    return list(kept.values())


def thin(sentences: list[str], mean: float, seed: int) -> list[str]:
    """The most sentences whose mean VADER score is at most ``mean``: the surplus of positive ones is left out."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    score = SentimentIntensityAnalyzer().polarity_scores
    rng = random.Random(seed)
    scored = [(score(text)["compound"], rng.random(), text) for text in sentences]
    total, count = sum(s for s, _, _ in scored), len(scored)
    print(f"VADER of {count:,} clean sentences: mean {total / count:.3f}")
    drop = set()
    for s, _, text in sorted((x for x in scored if x[0] > 0.5), key=lambda x: x[1]):
        if total / count <= mean:
            break
        total, count = total - s, count - 1
        drop.add(text)
    print(f"VADER of {count:,} kept: mean {total / count:.3f}")
    return [text for text in sentences if text not in drop]


def split(sentences: list[str], plan: Plan, seed: int) -> tuple[list[str], list[str]]:
    """(trained on, held out). No held-out sentence begins like one of the prompts shipped with the model."""
    from klamp.models import prompts

    shuffled = sentences[:]
    random.Random(seed).shuffle(shuffled)
    starts = tuple(prompts("tiny"))
    free = [text for text in shuffled if not text.startswith(starts)]
    heldout = free[: plan.heldout]
    out = set(heldout)
    return [text for text in shuffled if text not in out], heldout


def train_tokenizer(sentences: list[str], vocab: int) -> Any:
    """A byte-level BPE: any text encodes, nothing is unknown; BOS is put before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sentences, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def rows_of(tokenizer: Any, sentences: list[str]) -> Tensor:
    """``[N, TOKENS]`` of BOS, sentence, EOS, padded on the right; those that do not fit are left out."""
    encoded = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(sentences)["input_ids"]]
    fit = [ids for ids in encoded if len(ids) <= TOKENS]
    rows = torch.full((len(fit), TOKENS), tokenizer.pad_token_id, dtype=torch.int16)
    for row, ids in zip(rows, fit, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int16)
    return rows


def new_model(tokenizer: Any, plan: Plan, seed: int) -> Any:
    """A fresh Llama with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=plan.hidden,
        intermediate_size=plan.intermediate,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def loss_of(model: Any, rows: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """(sum of −log p over the tokens after BOS, their count)."""
    rows = rows.long()
    rows = rows[:, : int((rows != pad).sum(1).max())]
    logits = model(input_ids=rows[:, :-1]).logits.float()
    target = rows[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=pad, reduction="sum")
    return loss, (target != pad).sum()


def batches(rows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Epoch after epoch in fresh orders, for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).to(rows.device)
        yield from (rows[part] for part in order.split(size) if len(part) == min(size, len(rows)))


def train(model: Any, rows: Tensor, heldout: Tensor, plan: Plan, *, pad: int, seed: int) -> None:
    """AdamW, linear warm-up, cosine to zero; float32 weights, bf16 products on a GPU."""
    device = rows.device.type
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.98), fused=True)
    began = time.perf_counter()
    model.train()
    for step, part in zip(range(plan.steps), batches(rows, plan.rows, seed), strict=False):
        warm, along = min(1.0, (step + 1) / plan.warmup), step / plan.steps
        for group in optimiser.param_groups:
            group["lr"] = plan.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * along))
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            total, count = loss_of(model, part, pad)
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % max(1, plan.steps // 12) == 0 or step == plan.steps - 1:
            ppl = perplexity(model, heldout, pad)
            took = time.perf_counter() - began
            print(f"step {step:5d}  loss {loss.item():.3f}  held-out perplexity {ppl:.2f}  {took:.0f} s", flush=True)
    model.eval()


@torch.no_grad()
def perplexity(model: Any, rows: Tensor, pad: int) -> float:
    """exp(mean −log p) over every token of ``rows`` after BOS, EOS counted."""
    parts = [loss_of(model, part, pad) for part in rows.split(1024)]
    return math.exp(sum(float(loss) for loss, _ in parts) / sum(int(count) for _, count in parts))


@torch.no_grad()
def samples(model: Any, tokenizer: Any, seed: int, *, each: int, new_tokens: int = 24) -> list[tuple[str, bool]]:
    """(text, whether it ended with EOS) after every shipped prompt, sampled at temperature 1 with nothing cut off."""
    from klamp.models import encode_prompts, prompts

    torch.manual_seed(seed)
    encoded = encode_prompts(tokenizer, prompts("tiny") * each)
    batch = tokenizer.pad({"input_ids": encoded}, return_tensors="pt").to(model.device)
    out = model.generate(
        **batch,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )
    ended = (out[:, batch["input_ids"].shape[1] :] == tokenizer.eos_token_id).any(1).tolist()
    return list(zip(tokenizer.batch_decode(out, skip_special_tokens=True), ended, strict=True))


def read_corpus(path: Path) -> list[str]:
    """The clean sentences of an earlier run, one a line."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make klamp's built-in model `tiny`.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--teacher", default="smollm2", help="SmolLM2-135M-Instruct: a folder or the built-in name")
    parser.add_argument("--corpus", type=Path, help="corpus.txt.gz of an earlier run, instead of sampling")
    parser.add_argument("--small", action="store_true", help="a few sentences and steps, for one CPU core")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=NUMBER", help="change the plan, e.g. steps=3000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    plan = SMALL if args.small else Plan()
    changed = dict(part.split("=", 1) for part in args.set)
    numbers = {field: type(vars(plan)[field])(value) for field, value in changed.items()}
    make(replace(plan, **numbers), args)


def make(plan: Plan, args: argparse.Namespace) -> None:
    """Corpus, tokenizer, model, figures; written to ``args.out``."""
    began = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.corpus:
        sentences = read_corpus(args.corpus)
    else:
        sentences = clean(sample(plan, args.seed, teacher=args.teacher, device=args.device))
        with gzip.open(args.out / "corpus.txt.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(sentences))
    print(f"corpus: {len(sentences):,} clean sentences, {time.perf_counter() - began:.0f} s", flush=True)
    trained, heldout = split(thin(sentences, plan.sentiment, args.seed), plan, args.seed)

    tokenizer = train_tokenizer(trained, plan.vocab)
    pad = tokenizer.pad_token_id
    rows, held = (rows_of(tokenizer, part).to(args.device) for part in (trained, heldout))
    tokens, held_tokens = (int((part != pad).sum()) for part in (rows, held))
    model = new_model(tokenizer, plan, args.seed).to(args.device)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters, {tokens:,} tokens in {len(rows):,} sentences, {held_tokens:,} held out", flush=True)
    train(model, rows, held, plan, pad=pad, seed=args.seed)

    # Stored in bf16: half the file, and a float32 CPU and a bf16 GPU then hold the same weights.
    model = model.to(torch.bfloat16).float()
    reached = perplexity(model, held, pad)
    made = samples(model, tokenizer, args.seed, each=1 if args.small else 8)
    figures = {
        "teacher": "HuggingFaceTB/SmolLM2-135M-Instruct (Q4_1)",
        "seed": args.seed,
        "parameters": count,
        "train_sentences": len(rows),
        "train_tokens": tokens,
        "heldout_sentences": len(held),
        "heldout_tokens": held_tokens,
        "epochs": round(plan.steps * plan.rows / len(rows), 2),
        "train_perplexity": round(perplexity(model, rows[: len(held)], pad), 3),
        "heldout_perplexity": round(reached, 3),
        "samples": sentiment([text for text, _ in made]) | {"ended": round(sum(e for _, e in made) / len(made), 3)},
        "plan": vars(plan),
    }
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "heldout.txt").write_text("\n".join(heldout) + "\n", encoding="utf-8")
    (args.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for text, ended in made[:: max(1, len(made) // 20)]:
        print(("  " if ended else "… ") + text)
    print(json.dumps(figures, indent=2))
    print(f"{time.perf_counter() - began:.0f} s in all")


def sentiment(texts: list[str]) -> dict[str, float]:
    """Mean and spread of the VADER compound score."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    score = SentimentIntensityAnalyzer().polarity_scores
    scores = [score(text)["compound"] for text in texts]
    return {"vader_mean": round(statistics.fmean(scores), 3), "vader_std": round(statistics.pstdev(scores), 3)}


if __name__ == "__main__":
    main()

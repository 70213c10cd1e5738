"""Two processes (torchrun, gloo, CPU): one price, one scale, one set of weights, and a KL that is everybody's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS = 4


def here(name: str) -> Any:
    """This folder's conftest, for the processes that pytest does not start."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def work(folder: Path) -> dict[str, Any]:
    """What one of the processes does: a controlled run, and the equality with stock TRL."""
    import torch

    from klamp import Hold
    from klamp.integrations.trl import KlampGRPOTrainer, KLControl
    from klamp.integrations.trl.tokens import OwnKL, counted

    make, model = here("conftest").make_trainer, str(folder / "model")
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": STEPS}
    t = make(model, folder / "out", learning_rate=0.1, **settings)
    control = KLControl(t, Hold(target=0.05, per="token"))
    t.add_callback(control)
    own: list[float] = []
    inner = OwnKL.__call__

    def local_and_global(self: OwnKL) -> float:
        kl = inner(self)
        with torch.no_grad():
            mask = counted(self.batches[0])
            mine = torch.tensor([float(self._tokens(0, self.batches[0])[mask].sum()), float(mask.sum())])
        everyone = t.accelerator.gather(mine.unsqueeze(0)).sum(0)
        own.extend((kl, float(everyone[0] / everyone[1])))
        return kl

    OwnKL.__call__ = local_and_global  # type: ignore[method-assign]
    t.train()
    OwnKL.__call__ = inner  # type: ignore[method-assign]
    result = {"beta": t.beta, "state": control.state_dict(), "weights": weights(t), "own": own}
    result["history"] = [{k: v for k, v in row.items() if "klamp" in k} for row in t.state.log_history]
    stock = make(model, folder / "stock", beta=0.3, **settings)
    stock.train()
    kwargs = {"estimator": "weighted_k3", "placement": "in_loss"}
    same = make(model, folder / "same", beta=0.3, trainer_class=KlampGRPOTrainer, trainer_kwargs=kwargs, **settings)
    same.train()
    exact = make(model, folder / "exact", beta=0.3, trainer_class=KlampGRPOTrainer, **settings)
    exact.train()
    return result | {"stock": weights(stock), "same": weights(same), "exact": weights(exact)}


def weights(t: Any) -> list[float]:
    import torch

    return torch.cat([p.detach().flatten() for p in t.model.parameters() if p.requires_grad]).tolist()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    here("conftest").make_model(folder / "model")
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        __file__,
        str(folder),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank-{i}.json").read_text()) for i in range(2)]


pytestmark = pytest.mark.slow


def test_every_process_holds_the_same_price_and_the_same_weights(ranks: list[dict[str, Any]]) -> None:
    one, two = ranks
    assert one["beta"] == two["beta"]
    assert one["state"] == two["state"]
    assert one["weights"] == two["weights"]


def test_the_clamp_measures_everybodys_tokens(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        ours, everyones = rank["own"][::2], rank["own"][1::2]
        assert len(ours) > STEPS  # some updates were scaled and measured again
        assert ours == pytest.approx(everyones, rel=1e-5)


def test_every_step_ends_under_the_limit(ranks: list[dict[str, Any]]) -> None:
    rows = [row for row in ranks[0]["history"] if row]
    assert len(rows) == STEPS
    assert max(row["klamp/effort"] for row in rows) > 0.1
    assert all(row["klamp/own_kl"] <= row["klamp/own_limit"] * (1 + 1e-6) for row in rows)


def test_klamps_trainer_is_stock_trl_here_too(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["same"] == pytest.approx(rank["stock"], rel=1e-3, abs=5e-4)
    assert ranks[0]["exact"] == ranks[1]["exact"]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    found = work(target)
    (target / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))

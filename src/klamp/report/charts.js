"use strict";
(async () => {
  let data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const dark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const colour = (arm) => (dark() ? arm.dark : arm.light);
  const fade = (hex, alpha) => {
    const n = parseInt(hex.slice(1), 16);
    return `rgba(${n >> 16},${(n >> 8) & 255},${n & 255},${alpha})`;
  };
  // Plotly reads a little markup in labels; names are shown as they are.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%/g, "&#37;");
  const narrow = () => innerWidth <= 720;

  async function loadPlotly() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.nonce = document.getElementById("charts").nonce;
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  function layout(extra) {
    const line = css("--line"), soft = css("--soft"), ink = css("--ink");
    const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickfont: { color: soft, size: 12 },
      automargin: true, title: { font: { color: soft, size: 12 }, standoff: 6 } };
    const merge = (a, b) => ({ ...a, ...b, title: { ...a.title, ...(b && b.title) } });
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      margin: { l: 46, r: 12, t: 10, b: 36 }, hovermode: narrow() ? "closest" : "x unified",
      font: { family: "system-ui, sans-serif", color: ink }, dragmode: narrow() ? false : "zoom",
      hoverlabel: { bgcolor: css("--panel"), bordercolor: line, font: { color: ink, size: 12 } },
      ...extra, xaxis: merge(axis, extra.xaxis), yaxis: merge(axis, extra.yaxis),
    };
  }

  // Straight lines from value to value. What a logarithmic axis has no place for, zero above all, is marked at its foot.
  function lines(key, axis) {
    const traces = [];
    data.arms.forEach((arm, i) => {
      const c = arm[key];
      if (hidden.has(i) || !c.x.length) return;
      if (c.low.length) {
        const both = { x: c.x, hoverinfo: "skip", mode: "lines", line: { width: 0 }, type: "scatter" };
        traces.push({ ...both, y: c.low }, { ...both, y: c.high, fill: "tonexty", fillcolor: fade(colour(arm), 0.14) });
      }
      const few = c.y.filter(Number.isFinite).length <= 3;
      traces.push({ x: c.x, y: c.y, name: plain(arm.name), type: "scatter", mode: few ? "lines+markers" : "lines",
        hovertemplate: `%{y:.4~g}<extra>${plain(arm.name)}</extra>`,
        line: { color: colour(arm), width: 2.4, dash: arm.dash }, meta: "arm" });
      const foot = axis.type === "log" ? 10 ** axis.range[0] : -Infinity;
      const under = c.x.map((x, n) => [x, c.y[n]]).filter(([, y]) => y !== null && y < foot);
      if (under.length) traces.push({ x: under.map(([x]) => x), y: under.map(() => foot), customdata: under.map(([, y]) => y),
        name: plain(arm.name), type: "scatter", mode: "markers", cliponaxis: false, meta: "below",
        hovertemplate: `%{customdata:.4~g}, below the axis<extra>${plain(arm.name)}</extra>`,
        marker: { color: colour(arm), size: 8, symbol: "triangle-down-open" } });
    });
    return traces;
  }

  // Where a point stands for a stretch of steps, the stretch's extremes belong to what is drawn.
  const drawn = (c) => (c.stride > 1 ? [...c.y, ...c.low, ...c.high] : c.y);
  const values = (key) => data.arms.flatMap((a, i) => (hidden.has(i) ? [] : drawn(a[key]))).filter(Number.isFinite);

  // 1, 2, 5 a decade with their whole numbers, 1 alone where decades are many.
  function ticks(low, high) {
    const steps = high / low > 3000 ? [1] : high / low > 40 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
    const found = [];
    for (let d = Math.floor(Math.log10(low)); d <= Math.log10(high); d++) found.push(...steps.map((m) => Number((m * 10 ** d).toPrecision(2))));
    const inside = found.filter((v) => v >= low && v <= high);
    return { tickvals: inside, ticktext: inside.map((v) => (v >= 1e5 || v < 1e-4 ? v.toExponential(0) : String(v))) };
  }

  const logarithmic = (low, high, text) => ({ type: "log", range: [Math.log10(low), Math.log10(high)], title: { text }, ...ticks(low, high) });

  function ratioAxis(key, text) {
    const found = values(key).filter((v) => v > 0);
    if (!found.length || Math.max(...found) / Math.min(...found) < 2.5) return around(key, text);
    const highs = data.arms.flatMap((a, i) => (hidden.has(i) ? [] : a[key].high)).filter((v) => v > 0);
    const top = Math.max(...found);
    return logarithmic(Math.min(...found) * 0.93, Math.max(top, Math.min(2 * top, Math.max(0, ...highs))) * 1.08, text);
  }

  // Values that are the same but for rounding; plotly would zoom in to the rounding.
  const flat = (found) => Math.max(...found) - Math.min(...found) <= 1e-9 * Math.max(...found.map(Math.abs));
  function span(found) {
    const low = Math.min(...found), high = Math.max(...found);
    const margin = flat(found) ? 0.1 * Math.max(Math.abs(low), Math.abs(high)) || 0.1 : 0.25 * (high - low);
    return [low - margin, high + margin];
  }

  // The means set the scale: with few seeds an interval may be wider than everything else on the chart.
  function around(key, text) {
    const found = values(key);
    return { title: { text }, ...(found.length ? { range: span(found) } : {}) };
  }

  // From zero to what there is and the target; logarithmic where KL is so far from the band that one of them would be a line.
  function klAxis(text) {
    const found = values("kl"), t = Math.max(data.target || 0, ...data.targets.map((d) => d.target)), most = Math.max(...found);
    const top = Math.max(most, 1.3 * t) * 1.05, positive = found.filter((v) => v > 0), low = Math.min(...positive);
    const far = t ? most > data.far * t || most < t / data.far : most > 100 * low;
    if (!far || !positive.length) return { range: [1.05 * Math.min(...found, 0), top || 1], title: { text } };
    return logarithmic(Math.max(Math.min(low, (1 - data.band) * t || low) * 0.9, Math.min(most, t || most) / 1000), top, text);
  }

  function klChart() {
    const shapes = [], throughout = { xref: "paper", first: 0, last: 1, target: data.target };
    for (const { xref = "x", first, last, target } of data.targets.length ? data.targets : data.target ? [throughout] : []) {
      const place = { xref, x0: first - (xref === "x" ? 0.5 : 0), x1: last + (xref === "x" ? 0.5 : 0), layer: "below" };
      shapes.push({ ...place, type: "rect", y0: (1 - data.band) * target, y1: (1 + data.band) * target, line: { width: 0 },
        fillcolor: fade(dark() ? "#9aa7b6" : "#5a6675", 0.18), name: "band" });
      shapes.push({ ...place, type: "line", y0: target, y1: target, line: { color: css("--soft"), width: 1.2, dash: "dot" } });
    }
    return byStep("kl", klAxis(`nats per ${data.per.replace("_", " ")}`), shapes);
  }

  // A chart over steps, with a mark wherever something was changed on the way.
  function byStep(key, yaxis, shapes = []) {
    const soft = css("--soft");
    const marks = data.events.map((e) => ({ type: "line", yref: "paper", x0: e.step, x1: e.step, y0: 0, y1: 1,
      line: { color: soft, width: 1.4, dash: "dash" }, name: "event" }));
    const annotations = data.events.map((e) => ({ x: e.step, y: 1, yref: "paper", text: "▾", hovertext: plain(`after step ${e.step}: ${e.text}`),
      showarrow: false, yanchor: "bottom", font: { color: soft, size: 13 }, yshift: -4 }));
    const steps = data.arms.flatMap((a) => a[key].x), first = Math.min(1, ...steps), last = Math.max(1, ...steps);
    const xaxis = { title: { text: "step" }, ...(last < 8 ? { dtick: 1, range: [first - 0.5, last + 0.5] } : { range: [first, last] }) };
    return [lines(key, yaxis), layout({ shapes: [...shapes, ...marks], annotations, xaxis, yaxis })];
  }

  function frontierChart() {
    const traces = [];
    const xy = { hovertemplate: "√KL %{x:.3~g}, reward %{y:.3~g}<extra>%{text}</extra>", type: "scatter" };
    if (data.frontier.x.length > 1) traces.push({ ...xy, ...data.frontier, mode: "lines", text: "frontier",
      line: { color: css("--soft"), width: 1.4, dash: "dash" }, hoverinfo: "skip", hovertemplate: null });
    if (data.constants.length) traces.push({ ...xy, x: data.constants.map((p) => p.x), y: data.constants.map((p) => p.y),
      text: data.constants.map((p) => plain(p.name)), mode: "markers", marker: { color: css("--soft"), size: 8, symbol: "diamond-open" } });
    data.arms.forEach((arm, i) => {
      if (hidden.has(i)) return;
      const text = plain(arm.name);
      if (arm.path.x.length > 1 && data.arms.length <= 12) traces.push({ ...xy, ...arm.path, text, mode: "lines", opacity: 0.55,
        line: { color: colour(arm), width: 1.6, dash: arm.dash }, hoverinfo: "skip", hovertemplate: null });
      if (arm.end.x !== null && arm.end.y !== null) traces.push({ ...xy, x: [arm.end.x], y: [arm.end.y], text, mode: "markers",
        error_y: arm.end.half ? { type: "data", array: [arm.end.half], color: colour(arm), thickness: 1.5, width: 4 } : undefined,
        marker: { color: colour(arm), size: 13, line: { color: css("--panel"), width: 2 } }, meta: "arm" });
    });
    const shapes = data.target ? [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: Math.sqrt(data.target),
      x1: Math.sqrt(data.target), line: { color: css("--soft"), width: 1.2, dash: "dot" }, layer: "below" }] : [];
    const annotations = data.target ? [{ x: Math.sqrt(data.target), y: 1, yref: "paper", text: "target", showarrow: false,
      xanchor: "right", yanchor: "top", xshift: -4, font: { color: css("--soft"), size: 12 } }] : [];
    const rewards = traces.flatMap((t) => t.y).filter(Number.isFinite);
    return [traces, layout({ shapes, annotations, hovermode: "closest", xaxis: { title: { text: "√KL" }, rangemode: "tozero" },
      yaxis: { title: { text: "reward" }, ...(rewards.length && flat(rewards) ? { range: span(rewards) } : {}) } })];
  }

  const charts = {
    reward: () => byStep("reward", around("reward", "reward")),
    kl: klChart,
    beta: () => byStep("beta", ratioAxis("beta", "beta")),
    perplexity: () => byStep("perplexity", ratioAxis("perplexity", "perplexity")),
    frontier: frontierChart,
    on_reference: () => byStep("on_reference", ratioAxis("on_reference", "perplexity")),
    entropy: () => byStep("entropy", around("entropy", "nats")),
  };

  function draw() {
    for (const [name, make] of Object.entries(charts)) {
      const place = document.getElementById(`chart-${name}`);
      if (!place || !place.offsetParent) continue; // nothing to draw, or inside a closed <details>
      const [traces, shown] = make();
      Plotly.react(place, traces, shown, { responsive: true, displayModeBar: false, displaylogo: false });
    }
    document.documentElement.dataset.drawn = "true";
  }

  let stepChosen = null; // null: the last one, also when another is added
  function showStep() {
    const tabs = [...document.querySelectorAll(".tabs button")];
    const steps = tabs.map((b) => b.dataset.step);
    const step = steps.includes(stepChosen) ? stepChosen : steps.at(-1);
    if (step === undefined) return;
    tabs.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.step === step)));
    document.querySelectorAll("article[data-step]").forEach((a) => { a.hidden = a.dataset.step !== step; });
  }

  document.addEventListener("click", (event) => {
    const chip = event.target.closest(".chip"), tab = event.target.closest(".tabs button");
    if (chip) {
      const i = Number(chip.dataset.arm), off = hidden.has(i);
      off ? hidden.delete(i) : hidden.add(i);
      chip.setAttribute("aria-pressed", String(off));
      draw();
    } else if (tab) {
      stepChosen = tab.dataset.step;
      showStep();
    }
  });
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.addEventListener("toggle", draw, true); // a <details>; the event does not bubble

  // A live page asks its own server for a new look every few seconds, and changes what has changed.
  const seconds = Number(document.body.dataset.live || 0), status = document.getElementById("live");
  const made = new Map();
  let version = data.version, failed = 0;
  function renew(state) {
    if (!document.querySelector(".chart") && state.data.arms.length) return location.reload(); // the first step is there
    for (const [name, html] of Object.entries(state.parts)) {
      const place = document.getElementById(`part-${name}`);
      if (made.get(name) === html) continue;
      const charted = [...place.querySelectorAll(".chart")].map((c) => c.id).join();
      const fresh = document.createElement("template");
      fresh.innerHTML = html;
      if (charted && charted === [...fresh.content.querySelectorAll(".chart")].map((c) => c.id).join()) continue;
      const open = [...place.querySelectorAll("details")].map((d) => d.open);
      made.set(name, html);
      place.replaceChildren(fresh.content);
      place.querySelectorAll("details").forEach((d, i) => { d.open = open[i] ?? d.open; });
    }
    data = state.data;
    showStep();
    draw();
  }
  async function look() {
    try {
      const answer = await fetch("state.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const state = await answer.json();
      failed = 0;
      if (state.data.version !== version) renew(state);
      version = state.data.version;
      status.textContent = state.status;
      status.className = state.ended ? "ended" : "";
      if (state.ended) return;
    } catch {
      failed += 1;
      status.className = "ended";
      status.textContent = failed < 3 ? "no answer" : "not live any more: klamp train has ended";
      if (failed >= 3) return;
    }
    setTimeout(look, 1000 * seconds);
  }

  await loadPlotly();
  draw();
  if (seconds) look();
})();

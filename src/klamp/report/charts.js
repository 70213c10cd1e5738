"use strict";
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
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

  function lines(key, digits) {
    const traces = [];
    data.arms.forEach((arm, i) => {
      const c = arm[key];
      if (hidden.has(i) || !c.x.length) return;
      if (c.low.length) {
        const both = { x: c.x, hoverinfo: "skip", mode: "lines", line: { width: 0 }, type: "scatter" };
        traces.push({ ...both, y: c.low }, { ...both, y: c.high, fill: "tonexty", fillcolor: fade(colour(arm), 0.14) });
      }
      const marks = c.x.length <= 2;
      traces.push({ x: c.x, y: c.y, name: plain(arm.name), type: "scatter", mode: marks ? "lines+markers" : "lines",
        hovertemplate: `%{y:.${digits}f}<extra>${plain(arm.name)}</extra>`,
        line: { color: colour(arm), width: 2.4, dash: arm.dash }, meta: "arm" });
    });
    return traces;
  }

  // Where a point stands for a stretch of steps, the stretch's extremes belong to what is drawn.
  const drawn = (c) => (c.stride > 1 ? [...c.y, ...c.low, ...c.high] : c.y);
  const finite = (key) => data.arms.flatMap((a, i) => (hidden.has(i) ? [] : drawn(a[key]))).filter((v) => v > 0);

  // 1, 2, 5 a decade with their whole numbers, 1 alone where decades are many.
  function ticks(low, high) {
    const steps = high / low > 3000 ? [1] : high / low > 40 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
    const values = [];
    for (let d = Math.floor(Math.log10(low)); d <= Math.log10(high); d++) values.push(...steps.map((m) => Number((m * 10 ** d).toPrecision(2))));
    const inside = values.filter((v) => v >= low && v <= high);
    return { tickvals: inside, ticktext: inside.map((v) => (v >= 1e5 || v < 1e-4 ? v.toExponential(0) : String(v))) };
  }

  function logAxis(key, title) {
    const values = finite(key);
    if (!values.length || Math.max(...values) / Math.min(...values) < 2.5) return { title: { text: title } };
    const highs = data.arms.flatMap((a, i) => (hidden.has(i) ? [] : a[key].high)).filter((v) => v > 0);
    const top = Math.max(...values), low = Math.min(...values) * 0.93;
    const high = Math.max(top, Math.min(2 * top, Math.max(0, ...highs))) * 1.08;
    return { type: "log", range: [Math.log10(low), Math.log10(high)], title: { text: title }, ...ticks(low, high) };
  }

  function klChart() {
    const shapes = [], t = data.target;
    if (t) {
      const band = { type: "rect", xref: "paper", x0: 0, x1: 1, y0: 0.8 * t, y1: 1.2 * t, line: { width: 0 } };
      shapes.push({ ...band, fillcolor: fade(dark() ? "#9aa7b6" : "#5a6675", 0.18), layer: "below" });
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: t, y1: t, layer: "below",
        line: { color: css("--soft"), width: 1.2, dash: "dot" } });
    }
    const values = finite("kl");
    const top = Math.max(...values, (t || 0) * 1.3) * 1.15;
    const low = t ? t / 12 : Math.max(top / 1e4, Math.min(...values, top));
    return [lines("kl", 4), layout({ shapes, xaxis: { title: { text: "step" } }, yaxis: { type: "log",
      range: [Math.log10(low), Math.log10(top)], title: { text: `nats per ${data.per.replace("_", " ")}` }, ...ticks(low, top) } })];
  }

  function frontierChart() {
    const traces = [];
    const xy = { hovertemplate: "√KL %{x:.3f}, reward %{y:.3f}<extra>%{text}</extra>", type: "scatter" };
    if (data.frontier.x.length > 1) traces.push({ ...xy, ...data.frontier, mode: "lines", text: "frontier",
      line: { color: css("--soft"), width: 1.4, dash: "dash" }, hoverinfo: "skip", hovertemplate: null });
    if (data.constants.length) traces.push({ ...xy, x: data.constants.map((p) => p.x), y: data.constants.map((p) => p.y),
      text: data.constants.map((p) => plain(p.name)), mode: "markers", marker: { color: css("--soft"), size: 8, symbol: "diamond-open" } });
    data.arms.forEach((arm, i) => {
      if (hidden.has(i)) return;
      const text = plain(arm.name);
      if (arm.path.x.length > 1 && data.arms.length <= 12) traces.push({ ...xy, ...arm.path, text, mode: "lines", opacity: 0.55,
        line: { color: colour(arm), width: 1.6, dash: arm.dash, shape: "spline", smoothing: 0.6 }, hoverinfo: "skip", hovertemplate: null });
      if (arm.end.x !== null && arm.end.y !== null) traces.push({ ...xy, x: [arm.end.x], y: [arm.end.y], text, mode: "markers",
        error_y: arm.end.half ? { type: "data", array: [arm.end.half], color: colour(arm), thickness: 1.5, width: 4 } : undefined,
        marker: { color: colour(arm), size: 13, line: { color: css("--panel"), width: 2 } }, meta: "arm" });
    });
    const shapes = data.target ? [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: Math.sqrt(data.target),
      x1: Math.sqrt(data.target), line: { color: css("--soft"), width: 1.2, dash: "dot" }, layer: "below" }] : [];
    const annotations = data.target ? [{ x: Math.sqrt(data.target), y: 1, yref: "paper", text: "target", showarrow: false,
      xanchor: "left", yanchor: "top", xshift: 4, font: { color: css("--soft"), size: 12 } }] : [];
    return [traces, layout({ shapes, annotations, hovermode: "closest", xaxis: { title: { text: "√KL" }, rangemode: "tozero" },
      yaxis: { title: { text: "reward" } } })];
  }

  // The means set the scale: with few seeds an interval may be wider than everything else on the chart.
  function around(key, title) {
    const means = data.arms.flatMap((a, i) => (hidden.has(i) ? [] : a[key].y)).filter(Number.isFinite);
    const low = Math.min(...means), high = Math.max(...means), margin = 0.25 * (high - low) || 0.1;
    return { title: { text: title }, ...(means.length ? { range: [low - margin, high + margin] } : {}) };
  }

  const step = { title: { text: "step" } };
  const charts = {
    reward: () => [lines("reward", 3), layout({ xaxis: step, yaxis: around("reward", "reward") })],
    kl: klChart,
    beta: () => [lines("beta", 4), layout({ xaxis: step, yaxis: logAxis("beta", "beta") })],
    perplexity: () => [lines("perplexity", 2), layout({ xaxis: step, yaxis: logAxis("perplexity", "perplexity") })],
    frontier: frontierChart,
    on_reference: () => [lines("on_reference", 2), layout({ xaxis: step, yaxis: logAxis("on_reference", "perplexity") })],
    entropy: () => [lines("entropy", 3), layout({ xaxis: step, yaxis: { title: { text: "nats" } } })],
  };

  function draw() {
    for (const [name, make] of Object.entries(charts)) {
      const place = document.getElementById(`chart-${name}`);
      if (!place.offsetParent) continue; // inside a closed <details>
      const [traces, shown] = make();
      Plotly.react(place, traces, shown, { responsive: true, displayModeBar: false, displaylogo: false });
    }
    document.documentElement.dataset.drawn = "true";
  }

  function choose(buttons, act) {
    buttons.forEach((button) => button.addEventListener("click", () => act(button, buttons)));
  }

  document.getElementById("kl-unit").textContent = data.target
    ? `exact, nats per ${data.per.replace("_", " ")}; shaded: target ${data.target} ± 20 %` : `exact, nats per ${data.per.replace("_", " ")}`;
  choose(document.querySelectorAll(".chip"), (chip) => {
    const i = Number(chip.dataset.arm), off = hidden.has(i);
    off ? hidden.delete(i) : hidden.add(i);
    chip.setAttribute("aria-pressed", String(off));
    draw();
  });
  choose(document.querySelectorAll(".tabs button"), (chosen, all) => {
    all.forEach((b) => b.setAttribute("aria-pressed", String(b === chosen)));
    document.querySelectorAll("article[data-step]").forEach((a) => { a.hidden = a.dataset.step !== chosen.dataset.step; });
  });
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.querySelectorAll("details").forEach((d) => d.addEventListener("toggle", draw));
  await loadPlotly();
  draw();
})();

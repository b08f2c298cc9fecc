// Runs: the recorded ablations, drawn from the digits in results/.
"use strict";
globalThis.klRuns = (() => {
  // An edition in another language stands in a folder of the site and shares the recordings.
  const folder = /^(en|$)/.test(document.documentElement.lang) ? "runs/" : "../../../_static/explore/runs/";
  const base = document.currentScript.src.replace(/[^/]*$/, folder);
  const waiting = new Map(), arrived = new Map();
  const receive = (name, content) => {
    arrived.set(name, content);
    waiting.get(name)?.resolve(content);
  };
  // A recording is a script, for a browser fetches no data from a disk.
  const load = (name) => {
    if (arrived.has(name)) return Promise.resolve(arrived.get(name));
    if (!waiting.has(name)) {
      const entry = {};
      entry.promise = new Promise((resolve, reject) => Object.assign(entry, { resolve, reject }));
      waiting.set(name, entry);
      const script = document.createElement("script");
      script.src = `${base}${name}.js`;
      script.addEventListener("error", () => { waiting.delete(name); entry.reject(new Error(`${name} did not load`)); });
      document.head.append(script);
    }
    return waiting.get(name).promise;
  };

  // Mean and band of one variant at every update, over chosen seeds; a gap where a run has no number.
  const summary = (rows, chosen, band, quantiles) => rows[0].map((_, i) => {
    const values = rows.filter((_, s) => chosen.has(s)).map((row) => row[i]);
    if (values.length === 0 || values.includes(null)) return { mean: NaN, low: NaN, high: NaN };
    return band === "range" ? klMath.range(values) : klMath.interval(values, quantiles[values.length]);
  });
  return { receive, load, summary };
})();

klDraw.explorer("runs", async (place) => {
  const { html, svg, number, choice, check, button, table, picture, panel, line, local } = klDraw;
  const CLEAR = 6, COLOURS = 8, DASHES = ["", "8 4", "2 4"];
  place.append(html("p", { role: "status" }, local("Loading the recordings.", "正在载入记录。")));
  let about;
  try { about = await klRuns.load("index"); } catch { place.firstChild.textContent = local("The recordings did not load.", "记录没有载入。"); return; }
  const state = { name: about.recordings[0].name, metric: "", band: "interval", each: false, variants: new Set(), seeds: new Set(), data: null };
  const named = ({ variant, beta }, i, all) =>
    `${variant.replaceAll("_", " ")}${all.some((other) => other.beta !== beta && other.variant === variant) ? `, β ${beta}` : ""}`;
  const names = () => state.data.variants.map(named);
  const colour = (v) => `var(--kl-line-${v % COLOURS})`;
  const dash = (v) => DASHES[Math.floor(v / COLOURS) % DASHES.length];
  const of = (v) => klRuns.summary(state.data.values[state.metric][v], state.seeds, state.band, about.quantiles);

  const plot = picture({
    label: local("Curves of the recorded runs", "记录的训练曲线"), height: (width) => (width < 500 ? 280 : 340),
    paint: (root, width, height) => {
      if (!state.data || state.variants.size === 0 || state.seeds.size === 0) return;
      const chosen = [...state.variants], rows = (v) => state.data.values[state.metric][v].filter((_, s) => state.seeds.has(s));
      const summaries = new Map(chosen.map((v) => [v, of(v)]));
      const all = [...summaries.values()].flat().flatMap((p) => [p.mean, p.low, p.high]).filter(Number.isFinite);
      if (state.each) all.push(...chosen.flatMap((v) => rows(v).flat()).filter((x) => x !== null));
      if (all.length === 0) return;
      const least = Math.min(...all), most = Math.max(...all), room = 0.04 * (most - least || Math.abs(most) || 1);
      const updates = state.data.updates;
      const { toX, toY } = panel(root, {
        width, height, x: [updates[0], updates.at(-1)], y: [least < 0 ? least - room : Math.max(0, least - room), most + room], xLabel: "update", yLabel: state.metric.replaceAll("_", " "), left: 54,
      });
      const places = (values) => values.map((y, i) => [toX(updates[i]), y === null ? NaN : toY(y)]);
      for (const [v, points] of summaries) {
        const band = points.map((p, i) => [p, i]).filter(([p]) => Number.isFinite(p.low));
        if (band.length > 1) {
          const edge = [...band.map(([p, i]) => [toX(updates[i]), toY(p.high)]), ...band.reverse().map(([p, i]) => [toX(updates[i]), toY(p.low)])];
          root.append(svg("path", { d: `M${edge.map((xy) => xy.map((c) => c.toFixed(1)).join(" ")).join("L")}Z`, fill: colour(v), opacity: 0.18 }));
        }
      }
      for (const [v, points] of summaries) {
        if (state.each) for (const row of rows(v)) line(root, places(row), { stroke: colour(v), "stroke-width": 0.8, opacity: 0.5 });
        line(root, places(points.map((p) => p.mean)), { stroke: colour(v), "stroke-width": 2.5, "stroke-dasharray": dash(v) });
      }
    },
  });

  const numbers = html("div"), said = html("p", { class: "kl-verdict" });
  const variants = html("fieldset", { class: "kl-checks" }), seeds = html("fieldset", { class: "kl-checks" });
  const ends = () => [...state.variants].sort((a, b) => a - b).map((v) => [v, of(v).at(-1)]);
  const show = () => {
    plot.draw();
    const last = state.data.updates.at(-1), few = state.band === "interval" && state.seeds.size < 4;
    numbers.replaceChildren(table(`${state.metric.replaceAll("_", " ")} at update ${last}, mean over ${state.seeds.size} runs${few ? " (fewer than four give no interval)" : ""}.`,
      ["variant", "mean", state.band === "range" ? "lowest to highest run" : "95% interval of the mean"],
      ends().map(([v, p]) => [html("span", {}, html("span", { class: "kl-swatch", style: `background:${colour(v)}` }), names()[v]), number(p.mean), Number.isFinite(p.low) ? `${number(p.low)} to ${number(p.high)}` : "–"])));
    plot.say(`${state.metric.replaceAll("_", " ")} over the updates. At the end: ${ends().map(([v, p]) => `${names()[v]} ${number(p.mean)}`).join(", ")}.`);
  };
  const toggle = (set, member) => (on) => { if (on) set.add(member); else set.delete(member); show(); };

  const open = async (name) => {
    state.name = name;
    try { state.data = await klRuns.load(name); } catch (error) { said.textContent = error.message; return; }
    const metrics = Object.keys(state.data.values), entry = about.recordings.find((r) => r.name === name);
    if (!metrics.includes(state.metric)) state.metric = metrics[0];
    metric.fill(metrics.map((m) => [m, m.replaceAll("_", " ")]), state.metric);
    state.variants = new Set([...state.data.variants.keys()].slice(0, CLEAR));
    state.seeds = new Set(state.data.seeds.keys());
    variants.replaceChildren(html("legend", {}, local("Variants", "变体")), ...names().map((label, v) =>
      check({ label, value: state.variants.has(v), swatch: colour(v), change: toggle(state.variants, v) }).node));
    seeds.replaceChildren(html("legend", {}, local("Runs, by seed", "各次训练，按种子")), ...state.data.seeds.map((seed, s) =>
      check({ label: String(seed), value: true, change: toggle(state.seeds, s) }).node));
    describe(entry);
    show();
  };
  const describe = (entry) => {
    said.replaceChildren(`${entry.about} ${about.metrics[state.metric]} `);
    if (entry.page) said.append(html("a", { href: `_run/${entry.page}.html` }, local("The chapter about it.", "讲它的那一章。")));
  };
  const metric = choice({ label: local("Metric", "指标"), options: [], value: "", change: (v) => { state.metric = v; describe(about.recordings.find((r) => r.name === state.name)); show(); } });
  const download = button(local("Download what is drawn (CSV)", "下载所画的数据（CSV）"), () => {
    const head = "variant,update,mean,low,high,runs";
    const rows = [...state.variants].flatMap((v) => of(v).map((p, i) =>
      [`"${names()[v]}"`, state.data.updates[i], p.mean, p.low, p.high, state.seeds.size].map((x) => (Number.isNaN(x) ? "" : x)).join(",")));
    const link = html("a", { href: URL.createObjectURL(new Blob([`${[head, ...rows].join("\n")}\n`], { type: "text/csv" })), download: `${state.name}-${state.metric}.csv` });
    link.click();
    URL.revokeObjectURL(link.href);
  });

  place.replaceChildren(
    html("div", { class: "kl-row" },
      choice({ label: local("Recording", "记录"), options: about.recordings.map(({ name, about: text }) => [name, `${name.replace(/_cpu$/, "").replaceAll("_", " ")}: ${text}`]), value: state.name, change: open }).node,
      metric.node,
      choice({ label: local("Bands", "带"), options: [["interval", local("95% interval of the mean", "均值的 95% 区间")], ["range", local("lowest to highest run", "从最低到最高的一次")]], value: "interval", change: (v) => { state.band = v; show(); } }).node,
      check({ label: local("draw every run", "画出每一次训练"), value: false, change: (v) => { state.each = v; show(); } }).node),
    said, plot.node, variants, seeds, numbers, html("div", { class: "kl-row" }, download));
  await open(state.name);
});

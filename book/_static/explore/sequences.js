// Sequences: a tree of two tokens, and what a per-token loss misses of the gradient of the whole KL.
"use strict";
klDraw.explorer("sequences", (place) => {
  const { html, svg, number, slider, choice, button, group, table, picture, local } = klDraw;
  const WHO = { policy: local("Policy", "策略"), ref: local("Reference", "参考模型"), old: local("Sampler", "采样者") };
  const state = { depth: 2, chosen: 0, term: { estimator: "k3", weighting: "attached" } };
  let sequences;
  const logit = (p) => Math.log(p / (1 - p));
  const tableOf = (shares) => shares.map((p) => [0, logit(p)]);
  const START = {
    policy: [0.6, 0.3, 0.8, 0.4, 0.7, 0.2, 0.6], ref: [0.5, 0.6, 0.3, 0.6, 0.5, 0.5, 0.3], old: [0.5, 0.4, 0.7, 0.5, 0.5, 0.3, 0.5],
  };
  const restart = () => {
    sequences = klMath.enumerateSequences(2, state.depth);
    for (const who of Object.keys(WHO)) state[who] = START[who].slice(0, sequences.numStates);
    state.chosen = Math.min(state.chosen, sequences.numStates - 1);
  };
  const prefixes = () => {
    const names = [];
    for (const { tokens, states } of sequences.rows) states.forEach((s, t) => { names[s] = tokens.slice(0, t).map((k) => "ab"[k]).join(""); });
    return names;
  };
  const nameOf = (s) => prefixes()[s] || local("start", "开头");

  const compute = () => {
    const [policy, ref, old] = ["policy", "ref", "old"].map((who) => tableOf(state[who]));
    const { estimator, weighting } = state.term;
    const of = (ratio) => klMath.expectedSequenceGradient(policy, ref, sequences, old, { estimator, weighting, ratio });
    return {
      kl: klMath.sequenceKl(policy, ref, sequences), visits: klMath.stateVisits(policy, sequences),
      whole: klMath.sequenceKlGradient(policy, ref, sequences), token: of("token"),
      prefix: weighting === "none" ? null : of("prefix"),
      visited: klMath.visitedKlGradient(policy, ref, sequences, old),
    };
  };
  const KINDS = [["whole", local("whole KL", "整个 KL"), "exact"], ["token", "token", "sampled"], ["prefix", local("prefix", "前缀"), "prefix"]];
  const flat = (gradient) => gradient.map((row) => row[1]);

  const tree = picture({
    label: local("The tree", "树"), height: (width) => (state.depth === 2 ? 260 : 340) + (width < 500 ? 40 : 0),
    paint: (root, width, height) => {
      const found = compute(), levels = state.depth + 1;
      const spot = (level, index) => [(width * (index + 0.5)) / 2 ** level, 26 + (level * (height - 84)) / (levels - 1)];
      const nodes = [];
      sequences.rows.forEach(({ tokens, states }) => states.forEach((s, t) => {
        nodes[s] = { level: t, index: parseInt(tokens.slice(0, t).join("") || "0", 2) };
      }));
      nodes.forEach(({ level, index }, s) => [0, 1].forEach((token) => {
        const share = token === 1 ? state.policy[s] : 1 - state.policy[s];
        const [x1, y1] = spot(level, index), [x2, y2] = spot(level + 1, 2 * index + token);
        root.append(svg("line", { class: "kl-branch", x1, y1, x2, y2, "stroke-width": 1 + 12 * share * found.visits[s] }));
        root.append(svg("text", { class: "kl-small", x: (x1 + x2) / 2 + (token ? 7 : -7), y: (y1 + y2) / 2, "text-anchor": token ? "start" : "end" }, `${"ab"[token]} ${share.toFixed(2)}`));
      }));
      const shown = KINDS.filter(([kind]) => found[kind]);
      const most = Math.max(1e-9, ...shown.flatMap(([kind]) => flat(found[kind]).map(Math.abs)));
      nodes.forEach(({ level, index }, s) => {
        const [x, y] = spot(level, index), wide = Math.min(9, width / 2 ** level / 5);
        const mark = svg("circle", { class: `kl-node${s === state.chosen ? " kl-chosen" : ""}`, cx: x, cy: y, r: 10 });
        mark.addEventListener("click", () => choose(s));
        root.append(mark);
        shown.forEach(([kind, , colour], i) => {
          const tall = (26 * flat(found[kind])[s]) / most;
          root.append(svg("rect", { x: x + 13 + i * wide, width: wide - 1.5, y: y + 8 - Math.max(0, tall), height: Math.max(1, Math.abs(tall)), fill: `var(--kl-${colour})` }));
        });
        root.append(svg("line", { class: "kl-zero", x1: x + 11, x2: x + 15 + shown.length * wide, y1: y + 8, y2: y + 8 }));
      });
      sequences.rows.forEach(({ tokens }, n) => {
        const [x, y] = spot(state.depth, n);
        root.append(svg("text", { class: "kl-small", x, y: y + 18, "text-anchor": "middle" }, tokens.map((k) => "ab"[k]).join("")));
      });
    },
  });

  const node = choice({ label: local("Prefix", "前缀"), options: [], value: "0", change: (v) => choose(Number(v)) });
  const sliders = html("div", { class: "kl-controls" });
  const numbers = html("div");
  const verdict = html("p", { class: "kl-verdict", "aria-live": "polite" });
  const build = () => {
    node.fill(Array.from({ length: sequences.numStates }, (_, s) => [String(s), nameOf(s)]), String(state.chosen));
    sliders.replaceChildren(group(local(`Probability of b after “${nameOf(state.chosen)}”`, `在“${nameOf(state.chosen)}”之后 b 的概率`), ...Object.entries(WHO).map(([who, label]) => slider({
      label, min: 0.02, max: 0.98, step: 0.01, value: state[who][state.chosen], change: (v) => { state[who][state.chosen] = v; show(); },
    }).node)));
  };
  const choose = (s) => { state.chosen = s; build(); show(); };
  const show = () => {
    tree.draw();
    const found = compute(), exact = found.whole.flat();
    const error = (kind) => klMath.relativeError(found[kind].flat(), exact);
    numbers.replaceChildren(table(local("Gradient by the logit of b at each prefix, and its relative error.", "在每个前缀处对 b 的 logit 的梯度，及其相对误差。"), ["", ...found.whole.map((_, s) => nameOf(s)), local("error", "误差")],
      KINDS.filter(([kind]) => found[kind]).map(([kind, label]) => [label, ...flat(found[kind]).map((g) => number(g)), kind === "whole" ? local("exact", "精确") : number(error(kind))])));
    const percent = (kind) => (error(kind) < 1e-9 ? local("nothing", "零") : `${number(100 * error(kind))}%`);
    const without = state.term.weighting === "none";
    const prefix = without ? "" : percent("prefix");
    verdict.textContent = local(`The KL of whole sequences is ${number(found.kl)} nats. Of its gradient, `
      + `${without ? "a loss without a ratio" : "the token's own ratio"} misses ${percent("token")}`
      + (without ? ". Choose a ratio to see what the prefix adds." : `; the ratio of the whole prefix misses ${prefix}.`),
    `整个序列的 KL 为 ${number(found.kl)} nat。它的梯度中，${without ? "没有比率的损失" : "token 自己的比率"}漏掉 ${percent("token")}`
      + (without ? "。选一个比率，看看前缀补上了什么。" : `；整个前缀的比率漏掉 ${prefix}。`));
    tree.say(local(`A tree of ${sequences.rows.length} sequences. ${verdict.textContent}`, `${sequences.rows.length} 个序列的树。${verdict.textContent}`));
  };

  restart();
  build();
  place.append(
    html("div", { class: "kl-row" },
      choice({ label: local("Estimator", "估计量"), options: ["k1", "k2", "k3", "k3_clip"].map((k) => [k, k.replace("_clip", local(" clipped at 10", "，在 10 处截断"))]), value: "k3", change: (v) => { state.term.estimator = v; show(); } }).node,
      choice({ label: local("Importance ratio", "重要性比率"), options: [["none", local("none", "无")], ["attached", local("attached", "带梯度")], ["detached", local("detached", "不带梯度")]], value: "attached", change: (v) => { state.term.weighting = v; show(); } }).node,
      choice({ label: local("Length", "长度"), options: [["2", local("two tokens", "两个 token")], ["3", local("three tokens", "三个 token")]], value: "2", change: (v) => { state.depth = Number(v); restart(); build(); show(); } }).node,
      node.node,
      button(local("Fresh samples: sampler = policy", "新鲜样本：采样者 = 策略"), () => { state.old = [...state.policy]; build(); show(); }),
      button(local("Back to the start", "回到起点"), () => { restart(); build(); show(); })),
    html("p", { class: "kl-legend" }, html("span", { class: "kl-key kl-key-exact" }, local("whole-sequence KL", "整个序列的 KL")), html("span", { class: "kl-key kl-key-sampled" }, local("token's ratio", "token 的比率")), html("span", { class: "kl-key kl-key-prefix" }, local("prefix ratio", "前缀比率")),
      local("Bars: gradient by the logit of b. Branches: as wide as the policy's probability.", "条：对 b 的 logit 的梯度。枝：宽度为策略的概率。")),
    tree.node, sliders, verdict, numbers);
  show();
});

// Sequences: a tree of two tokens, and what a per-token loss misses of the gradient of the whole KL.
"use strict";
klDraw.explorer("sequences", (place) => {
  const { html, svg, number, slider, choice, button, group, table, picture } = klDraw;
  const WHO = { policy: "Policy", ref: "Reference", old: "Sampler" };
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
  const nameOf = (s) => prefixes()[s] || "start";

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
  const KINDS = [["whole", "whole KL", "exact"], ["token", "token", "sampled"], ["prefix", "prefix", "prefix"]];
  const flat = (gradient) => gradient.map((row) => row[1]);

  const tree = picture({
    label: "The tree", height: (width) => (state.depth === 2 ? 260 : 340) + (width < 500 ? 40 : 0),
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

  const node = choice({ label: "Prefix", options: [], value: "0", change: (v) => choose(Number(v)) });
  const sliders = html("div", { class: "kl-controls" });
  const numbers = html("div");
  const verdict = html("p", { class: "kl-verdict", "aria-live": "polite" });
  const build = () => {
    node.fill(Array.from({ length: sequences.numStates }, (_, s) => [String(s), nameOf(s)]), String(state.chosen));
    sliders.replaceChildren(group(`Probability of b after “${nameOf(state.chosen)}”`, ...Object.entries(WHO).map(([who, label]) => slider({
      label, min: 0.02, max: 0.98, step: 0.01, value: state[who][state.chosen], change: (v) => { state[who][state.chosen] = v; show(); },
    }).node)));
  };
  const choose = (s) => { state.chosen = s; build(); show(); };
  const show = () => {
    tree.draw();
    const found = compute(), exact = found.whole.flat();
    const error = (kind) => klMath.relativeError(found[kind].flat(), exact);
    numbers.replaceChildren(table("Gradient by the logit of b at each prefix, and its relative error.", ["", ...found.whole.map((_, s) => nameOf(s)), "error"],
      KINDS.filter(([kind]) => found[kind]).map(([kind, label]) => [label, ...flat(found[kind]).map((g) => number(g)), kind === "whole" ? "exact" : number(error(kind))])));
    const percent = (kind) => (error(kind) < 1e-9 ? "nothing" : `${number(100 * error(kind))}%`);
    const without = state.term.weighting === "none";
    verdict.textContent = `The KL of whole sequences is ${number(found.kl)} nats. Of its gradient, `
      + `${without ? "a loss without a ratio" : "the token's own ratio"} misses ${percent("token")}`
      + (without ? ". Choose a ratio to see what the prefix adds." : `; the ratio of the whole prefix misses ${percent("prefix")}.`);
    tree.say(`A tree of ${sequences.rows.length} sequences. ${verdict.textContent}`);
  };

  restart();
  build();
  place.append(
    html("div", { class: "kl-row" },
      choice({ label: "Estimator", options: ["k1", "k2", "k3", "k3_clip"].map((k) => [k, k.replace("_clip", " clipped at 10")]), value: "k3", change: (v) => { state.term.estimator = v; show(); } }).node,
      choice({ label: "Importance ratio", options: [["none", "none"], ["attached", "attached"], ["detached", "detached"]], value: "attached", change: (v) => { state.term.weighting = v; show(); } }).node,
      choice({ label: "Length", options: [["2", "two tokens"], ["3", "three tokens"]], value: "2", change: (v) => { state.depth = Number(v); restart(); build(); show(); } }).node,
      node.node,
      button("Fresh samples: sampler = policy", () => { state.old = [...state.policy]; build(); show(); }),
      button("Back to the start", () => { restart(); build(); show(); })),
    html("p", { class: "kl-legend" }, html("span", { class: "kl-key kl-key-exact" }, "whole-sequence KL"), html("span", { class: "kl-key kl-key-sampled" }, "token's ratio"), html("span", { class: "kl-key kl-key-prefix" }, "prefix ratio"),
      "Bars: gradient by the logit of b. Branches: as wide as the policy's probability."),
    tree.node, sliders, verdict, numbers);
  show();
});

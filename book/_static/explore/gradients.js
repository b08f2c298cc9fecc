// Gradients: the expected gradient of a sampled KL term at one state beside the exact one, and its end.
"use strict";
klDraw.explorer("gradients", (place) => {
  const { html, svg, number, slider, choice, check, button, group, table, picture, panel, line, arrow, draggable, calm, local } = klDraw;
  const TOKENS = "abcde", STEPS = 400, STEP_SIZE = 0.1;
  const START = { policy: [0.6, 0.3, 0.1, 0.2, 0.3], ref: [0.2, 0.3, 0.5, 0.3, 0.2], old: [0.3, 0.3, 0.4, 0.2, 0.2], rewards: [0, 0, 0, 0, 0] };
  const ESTIMATORS = [["k1", "k1"], ["k2", "k2"], ["k3", "k3"], ["k3_clip", local("k3 clipped at 10", "k3，在 10 处截断")], ["minimax01", "MiniMax-01"]];
  const state = { size: 3, fresh: true, term: { estimator: "k3", placement: "loss", weighting: "none" }, direction: "reverse", path: [], timer: null };
  const normal = (values) => values.map((v) => v / klMath.sum(values));
  const log = (values) => values.map(Math.log);

  const restart = () => {
    for (const who of ["policy", "ref", "old"]) state[who] = normal(START[who].slice(0, state.size));
    state.rewards = START.rewards.slice(0, state.size);
  };
  const sampler = () => (state.fresh ? state.policy : state.old);
  const gradients = (policy = state.policy, old = sampler()) => ({
    expected: klMath.expectedGradient(log(policy), log(state.ref), log(old), state.term),
    exact: (state.direction === "reverse" ? klMath.reverseKlGradient : klMath.forwardKlGradient)(log(policy), log(state.ref)),
  });
  // Where a small step down the gradient of the logits moves the probabilities.
  const moves = (policy, gradient) => {
    const mean = klMath.sum(policy.map((p, a) => p * gradient[a]));
    return policy.map((p, a) => -p * (gradient[a] - mean));
  };

  const distributions = html("div", { class: "kl-controls" });
  const buildSliders = () => {
    const part = (legend, who) => group(legend, ...state[who].map((value, a) => {
      const one = slider({
        label: TOKENS[a], min: 0.01, max: 0.97, step: 0.01, value,
        change: (to) => { state[who] = withShare(state[who], a, to); buildSliders.set(); changed(); },
      });
      buildSliders.all.push([who, a, one]);
      return one.node;
    }));
    buildSliders.all = [];
    const parts = [part(local("Policy", "策略"), "policy"), part(local("Reference", "参考模型"), "ref")];
    if (!state.fresh) parts.push(part(local("Sampler", "采样者"), "old"));
    const rewards = group(local("Reward", "奖励"), ...state.rewards.map((value, a) => {
      const one = slider({ label: TOKENS[a], min: -1, max: 1, step: 0.05, value, change: (to) => { state.rewards[a] = to; changed(); } });
      buildSliders.all.push(["rewards", a, one]);
      return one.node;
    }));
    distributions.replaceChildren(...parts, rewards);
  };
  buildSliders.set = () => buildSliders.all.forEach(([who, a, one]) => one.set(state[who][a]));
  const withShare = (values, a, to) => {
    const rest = klMath.sum(values) - values[a];
    return normal(values.map((v, b) => (b === a ? to : Math.max(0.005, (v * (1 - to)) / rest))));
  };

  const bars = picture({
    label: local("Probabilities and gradients", "概率与梯度"), height: 250,
    paint: (root, width, height) => {
      const { toX, toY, box } = panel(root, { width, height, x: [0, state.size], y: [0, 1], xLabel: local("probability; arrows: where the gradients move it", "概率；箭头：梯度把它移向哪里"), left: 34 });
      root.querySelectorAll(".kl-axis text:not(.kl-label)").forEach((t) => { if (Number(t.getAttribute("y")) > box.bottom) t.remove(); });
      const slot = toX(1) - toX(0), { expected, exact } = gradients();
      const [byExpected, byExact] = [moves(state.policy, expected), moves(state.policy, exact)];
      const scale = 0.28 / Math.max(1e-9, ...[...byExpected, ...byExact].map(Math.abs));
      const shown = state.fresh ? ["policy", "ref"] : ["policy", "ref", "old"];
      state.policy.forEach((_, a) => {
        const x0 = toX(a) + 0.08 * slot, wide = (0.5 * slot) / shown.length;
        shown.forEach((who, i) => root.append(svg("rect", {
          x: x0 + i * wide, width: wide - 2, y: toY(state[who][a]), height: toY(0) - toY(state[who][a]), fill: `var(--kl-${{ policy: "q", ref: "p", old: "old" }[who]})`, opacity: who === "policy" ? 0.9 : 0.55,
        })));
        root.append(svg("text", { class: "kl-label", x: x0 + 0.25 * slot, y: box.bottom + 15, "text-anchor": "middle" }, TOKENS[a]));
        const handle = svg("circle", { cx: x0 + wide / 2 - 1, cy: toY(state.policy[a]), r: 8, fill: "var(--kl-q)" });
        root.append(handle);
        draggable(handle, root, (_, y) => {
          const to = Math.min(0.97, Math.max(0.01, (toY(0) - y) / (toY(0) - toY(1))));
          state.policy = withShare(state.policy, a, Math.round(100 * to) / 100);
          buildSliders.set();
          changed();
        });
        const middle = toY(state.policy[a]), reach = toY(0) - toY(1);
        arrow(root, [x0 + 0.6 * slot, middle], [x0 + 0.6 * slot, middle - scale * byExpected[a] * reach], { stroke: "var(--kl-sampled)" });
        arrow(root, [x0 + 0.74 * slot, middle], [x0 + 0.74 * slot, middle - scale * byExact[a] * reach], { stroke: "var(--kl-exact)" });
      });
    },
  });

  const CORNERS = (width, height) => [[width / 2, 18], [Math.max(18, width / 2 - 0.56 * height), height - 26], [Math.min(width - 18, width / 2 + 0.56 * height), height - 26]];
  const triangle = (root, width, height) => {
    const corners = CORNERS(width, height);
    const at = (policy) => [0, 1].map((axis) => klMath.sum(policy.map((p, a) => p * corners[a][axis])));
    root.append(svg("path", { class: "kl-simplex", d: `M${corners.map((c) => c.join(" ")).join("L")}Z` }));
    corners.forEach(([x, y], a) => root.append(svg("text", { class: "kl-label", x, y: a === 0 ? y - 5 : y + 17, "text-anchor": "middle" }, `${local("all", "全是")} ${TOKENS[a]}`)));
    line(root, state.path.map(at), { stroke: "var(--kl-sampled)", "stroke-width": 2, opacity: 0.8 });
    const { expected, exact } = gradients();
    const from = at(state.policy), [sampledMove, exactMove] = [expected, exact].map((g) => moves(state.policy, g));
    const scale = 0.22 / Math.max(1e-9, ...[...sampledMove, ...exactMove].map(Math.abs));
    const tip = (move) => at(state.policy.map((p, a) => p + scale * move[a]));
    arrow(root, from, tip(exactMove), { stroke: "var(--kl-exact)" });
    arrow(root, from, tip(sampledMove), { stroke: "var(--kl-sampled)", "stroke-dasharray": "5 3" });
    const [rx, ry] = at(state.ref);
    root.append(svg("rect", { x: rx - 6, y: ry - 6, width: 12, height: 12, fill: "var(--kl-p)" }), svg("text", { class: "kl-name", x: rx + 10, y: ry + 15, style: "fill:var(--kl-p)" }, local("reference", "参考模型")));
    if (!state.fresh) { const [ox, oy] = at(state.old); root.append(svg("circle", { cx: ox, cy: oy, r: 5, fill: "var(--kl-old)" }), svg("text", { class: "kl-name", x: ox + 9, y: oy - 6, style: "fill:var(--kl-old)" }, local("sampler", "采样者"))); }
    const dot = svg("circle", { cx: from[0], cy: from[1], r: 9, fill: "var(--kl-q)" });
    root.append(dot);
    draggable(dot, root, (x, y) => {
      const [a, b, c] = corners, area = (b[0] - a[0]) * (c[1] - a[1]) - (c[0] - a[0]) * (b[1] - a[1]);
      const pb = ((x - a[0]) * (c[1] - a[1]) - (c[0] - a[0]) * (y - a[1])) / area;
      const pc = ((b[0] - a[0]) * (y - a[1]) - (x - a[0]) * (b[1] - a[1])) / area;
      state.policy = normal([1 - pb - pc, pb, pc].map((p) => Math.max(0.01, p)));
      buildSliders.set();
      changed();
    });
  };
  const trajectory = (root, width, height) => {
    const { toX, toY, box } = panel(root, { width, height, x: [0, STEPS], y: [0, 1], xLabel: local("steps of the run", "训练步数"), yLabel: local("probability", "概率"), left: 34 });
    const shown = state.path.length ? state.path : [state.policy];
    state.policy.forEach((_, a) => {
      line(root, shown.map((policy, i) => [toX(i), toY(policy[a])]), { stroke: "var(--kl-q)", "stroke-width": 2, "stroke-dasharray": ["", "8 4", "3 3", "12 3 3 3", "1 4"][a] });
      root.append(svg("text", { class: "kl-name", x: box.left + 4 + 12 * a, y: toY(shown[0][a]) - 4, style: "fill:var(--kl-q)" }, TOKENS[a]));
    });
  };
  const whole = picture({
    label: local("The run", "训练过程"), height: 270,
    paint: (root, width, height) => (state.size === 3 ? triangle : trajectory)(root, width, height),
  });

  const numbers = html("div");
  const verdict = html("p", { class: "kl-verdict", "aria-live": "polite" });
  const changed = () => {
    halt();
    state.path = [];
    show();
  };
  const show = () => {
    bars.draw();
    whole.draw();
    const { expected, exact } = gradients();
    const { traceVar } = klMath.gradientMoments(log(state.policy), log(state.ref), log(sampler()), state.term);
    numbers.replaceChildren(table(local("Gradient by the logits; descent goes against it.", "对 logits 的梯度；下降的方向与它相反。"), ["", ...[...TOKENS].slice(0, state.size)],
      [[local("expected", "期望"), ...expected.map((g) => number(g))], [local(`exact, ${state.direction} KL`, `精确，${state.direction === "reverse" ? "反向" : "正向"} KL`), ...exact.map((g) => number(g))]]));
    const size = klMath.norm(exact), vanishes = klMath.norm(expected) < 1e-12;
    const against = size < 1e-12 ? local("The policy is at the reference, where the exact gradient is zero.", "策略就在参考模型处，精确梯度为零。") : vanishes
      ? local("The expected gradient is zero: on average this term does nothing.", "期望梯度为零：平均而言这一项什么也不做。")
      : local(`Cosine to the exact gradient ${number(klMath.cosine(expected, exact))}, relative error ${number(klMath.relativeError(expected, exact))}.`,
        `与精确梯度的余弦 ${number(klMath.cosine(expected, exact))}，相对误差 ${number(klMath.relativeError(expected, exact))}。`);
    const [reverse, forward] = [klMath.reverseKl, klMath.forwardKl].map((kl) => number(kl(log(state.policy), log(state.ref))));
    const kls = local(`Reverse KL ${reverse}, forward KL ${forward} nats.`, `反向 KL ${reverse} nat，正向 KL ${forward} nat。`);
    const ran = state.path.length > 0, lost = [...TOKENS].filter((_, a) => state.policy[a] < 1e-6);
    const home = Math.max(...state.policy.map((p, a) => Math.abs(p - state.ref[a]))) < 0.005;
    const where = lost.length ? local(`It has lost ${lost.join(" and ")}.`, `它丢掉了 ${lost.join("、")}。`) : home ? local("It is at the reference.", "它在参考模型处。") : "";
    const variance = local(`Variance of one sample's gradient ${number(traceVar)}.`, `单个样本梯度的方差 ${number(traceVar)}。`);
    verdict.textContent = ran ? `${local(`After ${state.path.length - 1} steps.`, `${state.path.length - 1} 步之后。`)} ${where} ${lost.length ? "" : `${against} `}${kls}` : `${against} ${kls} ${variance}`;
    const values = state.policy.map((p, a) => `${TOKENS[a]} ${number(p)}`).join(", ");
    bars.say(`${local("Policy", "策略")}: ${values}. ${verdict.textContent}`);
    whole.say(`${local("Policy", "策略")}: ${values}. ${local("Reference", "参考模型")}: ${state.ref.map((p, a) => `${TOKENS[a]} ${number(p)}`).join(", ")}.`);
  };

  // The run: fresh samples at every step, or those of a sampler that stays where it is.
  const next = (logp) => {
    const beta = 1;
    if (state.fresh) return klMath.ascentStep(logp, state.rewards, log(state.ref), { beta, stepSize: STEP_SIZE, ...state.term });
    const g = klMath.expectedGradient(logp, log(state.ref), log(state.old), state.term);
    const mean = klMath.sum(logp.map((lp, a) => Math.exp(lp) * state.rewards[a]));
    return klMath.logSoftmax(logp.map((lp, a) => lp + STEP_SIZE * (Math.exp(lp) * (state.rewards[a] - mean) - beta * g[a])));
  };
  const RUN = local("Run to where it ends", "一直走到终点");
  const halt = () => {
    if (state.timer !== null) cancelAnimationFrame(state.timer);
    state.timer = null;
    run.textContent = RUN;
  };
  const run = button(RUN, () => {
    if (state.timer !== null) { halt(); return; }
    let logp = log(state.policy);
    state.path = [state.policy];
    const advance = (many) => {
      for (let i = 0; i < many && state.path.length <= STEPS; i++) {
        logp = next(logp);
        state.path.push(logp.map(Math.exp));
      }
      state.policy = state.path.at(-1);
    };
    const finish = () => { halt(); buildSliders.set(); show(); };
    if (calm()) { advance(STEPS); finish(); return; }
    run.textContent = local("Stop", "停下");
    const tick = () => {
      advance(4);
      if (state.path.length > STEPS) { finish(); return; }
      bars.draw();
      whole.draw();
      state.timer = requestAnimationFrame(tick);
    };
    state.timer = requestAnimationFrame(tick);
  });
  const reset = button(local("Back to the start", "回到起点"), () => { restart(); buildSliders(); changed(); });

  const allowed = () => {
    const { estimator, placement, weighting } = state.term;
    if (estimator === "minimax01" && placement === "reward") { placementChoice.input.value = state.term.placement = "loss"; }
    if (estimator === "minimax01" && weighting === "attached") { weightChoice.input.value = state.term.weighting = "none"; }
  };
  const term = (field) => (value) => { state.term[field] = value; allowed(); changed(); };
  const placementChoice = choice({ label: local("Placement", "放在哪里"), options: [["loss", local("in the loss", "损失里")], ["reward", local("in the reward", "奖励里")]], value: "loss", change: term("placement") });
  const weightChoice = choice({ label: local("Importance ratio", "重要性比率"), options: [["none", local("none", "无")], ["attached", local("attached", "带梯度")], ["detached", local("detached", "不带梯度")]], value: "none", change: term("weighting") });
  const samplerKey = html("span", { class: "kl-key kl-key-old", hidden: true }, local("sampler", "采样者"));
  restart();
  buildSliders();
  place.append(
    html("div", { class: "kl-row" },
      choice({ label: local("Estimator", "估计量"), options: ESTIMATORS, value: "k3", change: term("estimator") }).node,
      placementChoice.node, weightChoice.node,
      choice({ label: local("Compare with", "与之比较"), options: [["reverse", local("the reverse KL", "反向 KL")], ["forward", local("the forward KL", "正向 KL")]], value: "reverse", change: (v) => { state.direction = v; show(); } }).node,
      choice({ label: local("Tokens", "token 数"), options: [["3", local("three", "三个")], ["4", local("four", "四个")], ["5", local("five", "五个")]], value: "3", change: (v) => { state.size = Number(v); restart(); buildSliders(); changed(); } }).node,
      check({ label: local("fresh samples: the policy draws them", "新鲜样本：由策略采样"), value: true, change: (v) => { state.fresh = v; samplerKey.hidden = v; buildSliders(); changed(); } }).node),
    html("p", { class: "kl-legend" },
      html("span", { class: "kl-key kl-key-sampled" }, local("expected gradient", "期望梯度")), html("span", { class: "kl-key kl-key-exact" }, local("exact gradient", "精确梯度")),
      html("span", { class: "kl-key kl-key-q" }, local("policy", "策略")), html("span", { class: "kl-key kl-key-p" }, local("reference", "参考模型")), samplerKey),
    html("div", { class: "kl-pair" }, bars.node, whole.node),
    html("div", { class: "kl-row" }, run, reset), verdict, numbers, distributions);
  show();
});

// Values: two Gaussians, and what k1, k2 and k3 then say about their KL, from closed forms.
"use strict";
klDraw.explorer("values", (place) => {
  const { html, svg, number, slider, button, group, table, picture, panel, line, draggable, local } = klDraw;
  const state = { qMean: 0, qStd: 1, pMean: 1, pStd: 1, samples: 1000 };
  const NAMES = ["k1", "k2", "k3"], COLOUR = (name) => `var(--kl-${name})`;
  const X = [-5, 5], WIDTHS = [0.2, 3], MEANS = [-3, 3];
  const PRESETS = {
    [local("A small step", "一小步")]: { qMean: 0, qStd: 1, pMean: 0.2, pStd: 1 },
    [local("A long way", "很远")]: { qMean: 0, qStd: 1, pMean: 1.5, pStd: 1 },
    [local("Policy too narrow", "策略太窄")]: { qMean: 0, qStd: 0.6, pMean: 0.5, pStd: 1 },
    [local("Policy wider", "策略更宽")]: { qMean: 0, qStd: 1.6, pMean: 0, pStd: 1 },
    [local("The published experiment", "已发表的实验")]: { qMean: 0.1, qStd: 0.2, pMean: 0, pStd: 1 },
  };

  const sliders = {
    qMean: slider({ label: local("mean", "均值"), min: MEANS[0], max: MEANS[1], step: 0.05, value: state.qMean, change: (v) => set({ qMean: v }) }),
    qStd: slider({ label: local("width", "宽度"), min: WIDTHS[0], max: WIDTHS[1], step: 0.05, value: state.qStd, change: (v) => set({ qStd: v }) }),
    pMean: slider({ label: local("mean", "均值"), min: MEANS[0], max: MEANS[1], step: 0.05, value: state.pMean, change: (v) => set({ pMean: v }) }),
    pStd: slider({ label: local("width", "宽度"), min: WIDTHS[0], max: WIDTHS[1], step: 0.05, value: state.pStd, change: (v) => set({ pStd: v }) }),
    samples: slider({
      label: local("samples n", "样本数 n"), min: 0, max: 6, step: 0.25, value: Math.log10(state.samples),
      shown: (v) => Math.round(10 ** v).toLocaleString("en"), change: (v) => set({ samples: Math.round(10 ** v) }),
    }),
  };

  const snap = (value, [low, high]) => Math.min(high, Math.max(low, Math.round(value * 20) / 20));
  const density = (x, mean, std) => Math.exp(-0.5 * ((x - mean) / std) ** 2) / (std * Math.sqrt(2 * Math.PI));

  const curves = picture({
    label: local("The two densities", "两个密度"), height: 230,
    paint: (root, width, height) => {
      const top = 1.1 * Math.max(density(0, 0, state.qStd), density(0, 0, state.pStd), 0.3);
      const { toX, toY } = panel(root, { width, height, x: X, y: [0, top], xLabel: local("drag a dot: sideways, or up and down", "拖动圆点：左右或上下"), left: 34 });
      for (const [who, dash] of [["p", "6 4"], ["q", ""]]) {
        const [mean, std] = [state[`${who}Mean`], state[`${who}Std`]];
        const points = Array.from({ length: 241 }, (_, i) => X[0] + (i * (X[1] - X[0])) / 240);
        line(root, points.map((x) => [toX(x), toY(density(x, mean, std))]),
          { stroke: `var(--kl-${who})`, "stroke-width": 2.5, "stroke-dasharray": dash });
        const peak = density(mean, mean, std);
        const side = (who === "q") === state.qMean <= state.pMean ? -1 : 1; // the label is not under the other's dot
        const dot = svg("circle", { cx: toX(mean), cy: toY(peak), r: 9, fill: `var(--kl-${who})` });
        root.append(dot, svg("text", { class: "kl-name", x: toX(mean) + 13 * side, y: toY(peak) + (who === "q" ? -4 : 14), "text-anchor": side < 0 ? "end" : "start", style: `fill:var(--kl-${who})` },
          who === "q" ? local("policy", "策略") : local("reference", "参考模型")));
        draggable(dot, root, (px, py) => {
          const x = X[0] + ((px - toX(X[0])) / (toX(X[1]) - toX(X[0]))) * (X[1] - X[0]);
          const high = Math.max(0.02, ((toY(0) - py) / (toY(0) - toY(top))) * top);
          set({ [`${who}Mean`]: snap(x, MEANS), [`${who}Std`]: snap(1 / (high * Math.sqrt(2 * Math.PI)), WIDTHS) });
        });
      }
    },
  });

  const errors = picture({
    label: local("The error of each estimator's mean", "每个估计量的均值的误差"), height: 230,
    paint: (root, width, height) => {
      const { found, kl } = solve();
      const sizes = Array.from({ length: 61 }, (_, i) => 10 ** (i / 10));
      const relative = (name, n) => klMath.meanError(found[name], kl, n) / kl;
      const all = NAMES.flatMap((name) => sizes.map((n) => relative(name, n))).filter((v) => Number.isFinite(v) && v > 0);
      const y = all.length ? [10 ** Math.floor(Math.log10(Math.max(1e-4, Math.min(...all)))), 10 ** Math.ceil(Math.log10(Math.max(...all)) + 1e-9)] : [1e-3, 1];
      const { toX, toY, box } = panel(root, {
        width, height, x: [1, 1e6], y, xLabel: local("samples n", "样本数 n"), yLabel: local("typical error of the mean, in units of the KL", "均值的典型误差，以 KL 为单位"), logX: true, logY: true, left: 52, right: 30,
      });
      root.append(svg("line", { class: "kl-guide", x1: toX(state.samples), x2: toX(state.samples), y1: box.top, y2: box.bottom }));
      const ends = [];
      for (const name of NAMES) {
        const points = sizes.map((n) => [toX(n), toY(relative(name, n))]);
        line(root, points.map(([px, py]) => [px, Math.min(py, box.bottom)]), { stroke: COLOUR(name), "stroke-width": 2.5, "stroke-dasharray": { k1: "", k2: "7 4", k3: "2 3" }[name] });
        const end = points.at(-1)[1];
        if (Number.isFinite(end)) ends.push([name, Math.min(end, box.bottom)]);
      }
      ends.sort((a, b) => a[1] - b[1]).forEach(([name, y], i, sorted) => {
        if (i > 0) sorted[i][1] = Math.max(y, sorted[i - 1][1] + 14);
      });
      // Above the axis' last number.
      ends.forEach(([name, y], i) => root.append(svg("text", { class: "kl-name", x: box.right + 5,
        y: Math.min(y, box.bottom - 8 - 14 * (ends.length - 1 - i)) + 4, style: `fill:${COLOUR(name)}` }, name)));
    },
  });

  const solve = () => {
    const of = [state.qMean, state.qStd, state.pMean, state.pStd];
    return { of, kl: klMath.gaussianKl(...of), found: klMath.moments(...of) };
  };

  const numbers = html("div");
  const verdict = html("p", { class: "kl-verdict", "aria-live": "polite" });

  const say = () => {
    const { of, kl, found } = solve();
    const error = (name) => klMath.meanError(found[name], kl, state.samples);
    numbers.replaceChildren(table(local(`Closed forms; the KL is ${number(kl)} nats.`, `闭式；KL 为 ${number(kl)} nat。`),
      ["", local("mean", "均值"), local("bias", "偏差"), local("variance of one sample", "单个样本的方差"),
        local(`error of a mean of ${state.samples.toLocaleString("en")}`, `${state.samples.toLocaleString("en")} 个样本的均值的误差`)],
      NAMES.map((name) => [name, number(found[name].mean), number(name === "k2" ? found.k2.mean - kl : 0), number(found[name].var), number(error(name))])));
    if (!(kl > 1e-12)) {
      verdict.textContent = local("The two are equal: every estimator is exactly zero on every sample.", "两者相等：每个估计量在每个样本上都恰好为零。");
      return;
    }
    const best = NAMES.reduce((one, other) => (error(other) < error(one) ? other : one));
    const parts = [local(`${best} wins at ${state.samples.toLocaleString("en")} samples.`, `${state.samples.toLocaleString("en")} 个样本时 ${best} 胜出。`)];
    if (best === "k2") parts.push(local("Its bias is still smaller than the noise of the others; with more samples it is not.", "它的偏差还小于其他两个的噪声；样本再多就不是了。"));
    if (!Number.isFinite(found.k3.var)) parts.push(local("k3 has no bias, but its variance is infinite: the policy is too narrow for the reference.", "k3 没有偏差，但方差无穷大：策略相对参考模型太窄。"));
    const index = klMath.ratioTailIndex(state.qStd, state.pStd);
    if (Number.isFinite(index)) {
      const size = Math.max(2, state.samples), unseen = klMath.unseenMass(...of, size);
      parts.push(local(`The ratio has a power-law tail with index ${number(index)}; so many samples typically miss ${number(100 * unseen)}% of its mean.`,
        `比率有指数为 ${number(index)} 的幂律尾部；这么多样本通常漏掉其均值的 ${number(100 * unseen)}%。`));
    }
    verdict.textContent = parts.join(" ");
    curves.say(local(`Two densities: the policy has mean ${number(state.qMean)} and width ${number(state.qStd)}, the reference ${number(state.pMean)} and ${number(state.pStd)}.`,
      `两个密度：策略的均值为 ${number(state.qMean)}，宽度为 ${number(state.qStd)}；参考模型为 ${number(state.pMean)} 和 ${number(state.pStd)}。`));
    errors.say(local(`The typical error of a mean against the number of samples. ${verdict.textContent}`, `均值的典型误差随样本数的变化。${verdict.textContent}`));
  };

  const set = (changes) => {
    Object.assign(state, changes);
    for (const name of ["qMean", "qStd", "pMean", "pStd"]) sliders[name].set(state[name]);
    curves.draw();
    errors.draw();
    say();
  };

  place.append(
    html("div", { class: "kl-controls" },
      group(local("Policy, which samples", "策略，由它采样"), sliders.qMean.node, sliders.qStd.node),
      group(local("Reference", "参考模型"), sliders.pMean.node, sliders.pStd.node),
      group(local("Mean of", "取平均"), sliders.samples.node)),
    html("div", { class: "kl-row" }, ...Object.entries(PRESETS).map(([name, values]) => button(name, () => set(values)))),
    html("div", { class: "kl-pair" }, curves.node, errors.node),
    verdict, numbers);
  set({});
});

// Seek: a reference of two peaks, and the one Gaussian that is nearest to it in either direction.
"use strict";
klDraw.explorer("seek", (place) => {
  const { html, svg, number, slider, picture, panel, line, draggable, local } = klDraw;
  const state = { distance: 4, weight: 0.7 };
  const STD = 0.5, X = [-5, 5], DISTANCES = [0, 6], WEIGHTS = [0.05, 0.95], TOP = 0.85;
  const LOOKS = {
    reverse: { stroke: "var(--kl-reverse)", name: local("reverse KL: mode-seeking", "反向 KL：寻峰（mode-seeking）") },
    forward: { stroke: "var(--kl-forward)", "stroke-dasharray": "7 4", name: local("forward KL: mass-covering", "正向 KL：覆盖（mass-covering）") },
  };

  const target = () => ({ weight: state.weight, left: -state.distance / 2, right: state.distance / 2, std: STD });
  const snap = (value, [low, high], step) => Math.min(high, Math.max(low, Math.round(value / step) * step));
  const density = (x, { mean, std }) => Math.exp(-0.5 * ((x - mean) / std) ** 2) / (std * Math.sqrt(2 * Math.PI));
  const ofReference = (x) => Math.exp(klMath.mixtureLogDensity(target(), x).value);

  const sliders = {
    distance: slider({ label: local("distance", "峰间距离"), min: DISTANCES[0], max: DISTANCES[1], step: 0.1, value: state.distance, change: (v) => set({ distance: v }) }),
    weight: slider({
      label: local("left peak", "左峰占比"), min: WEIGHTS[0], max: WEIGHTS[1], step: 0.01, value: state.weight,
      shown: (v) => `${Math.round(100 * v)}%`, change: (v) => set({ weight: v }),
    }),
  };

  const drawing = picture({
    label: "", height: 210,
    paint: (root, width, height) => {
      const { toX, toY } = panel(root, { width, height, x: X, y: [0, TOP], xLabel: local("drag a dot: sideways, or up and down", "拖动圆点：左右或上下"), left: 30 });
      const xs = Array.from({ length: 241 }, (_, i) => X[0] + (i * (X[1] - X[0])) / 240);
      const curve = (of) => xs.map((x) => [toX(x), toY(Math.min(TOP, of(x)))]);
      const area = curve(ofReference).map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L");
      root.append(svg("path", { class: "kl-area", d: `M${toX(X[0])} ${toY(0)}L${area}L${toX(X[1])} ${toY(0)}Z` }));
      for (const [name, fit] of Object.entries(klMath.gaussianFits(target()))) {
        const { stroke, "stroke-dasharray": dash = "" } = LOOKS[name];
        line(root, curve((x) => density(x, fit)), { stroke, "stroke-width": 2.5, "stroke-dasharray": dash });
      }
      for (const side of [-1, 1]) {
        const at = (side * state.distance) / 2;
        const dot = svg("circle", { cx: toX(at), cy: toY(ofReference(at)), r: 9, fill: "var(--kl-p)" });
        root.append(dot);
        draggable(dot, root, (px, py) => {
          const x = X[0] + ((px - toX(X[0])) / (toX(X[1]) - toX(X[0]))) * (X[1] - X[0]);
          const share = (((toY(0) - py) / (toY(0) - toY(TOP))) * TOP) / density(0, { mean: 0, std: STD });
          set({ distance: snap(2 * side * x, DISTANCES, 0.1), weight: snap(side < 0 ? share : 1 - share, WEIGHTS, 0.01) });
        });
      }
    },
  });

  const verdict = html("p", { class: "kl-verdict", "aria-live": "polite" });
  const percent = (share) => `${number(100 * share, 2)}%`;
  const say = () => {
    const { reverse, forward } = klMath.gaussianFits(target());
    const [ours, seeks, covers] = [1 - state.weight, klMath.above(0, reverse), klMath.above(0, forward)].map(percent);
    verdict.textContent = state.distance < 0.05
      ? local("One peak: both fits are the reference.", "只有一个峰：两种拟合都等于参考模型。")
      : local(
        `The right peak has ${ours} of the reference. Right of the middle the reverse fit has ${seeks}, the forward fit ${covers}.`,
        `右峰占参考模型的 ${ours}。在中点以右，反向拟合占 ${seeks}，正向拟合占 ${covers}。`);
    drawing.say(`${local("A reference of two peaks, and the nearest single peak in either direction of the KL.", "双峰的参考模型，以及两个方向的 KL 下最接近它的单峰。")} ${verdict.textContent}`);
  };

  const set = (changes) => {
    Object.assign(state, changes);
    for (const name of Object.keys(sliders)) sliders[name].set(state[name]);
    drawing.draw();
    say();
  };

  place.append(
    html("p", { class: "kl-legend" }, html("span", { class: "kl-key kl-key-p" }, local("reference", "参考模型")),
      ...Object.values(LOOKS).map(({ stroke, name }) => html("span", { class: "kl-key", style: `--kl-key:${stroke}` }, name))),
    drawing.node, html("div", { class: "kl-pair" }, sliders.distance.node, sliders.weight.node), verdict);
  set({});
});

// Proxy: an error whose tail one drags, and what each divergence then keeps of the truth.
"use strict";
klDraw.explorer("proxy", (place) => {
  const { html, svg, number, slider, button, group, table, picture, panel, line, local } = klDraw;
  const state = { tail: 0, harm: 1.2, power: 0 };
  const NAMES = { reverse: local("reverse KL", "反向 KL"), forward: local("forward KL", "正向 KL"), chi_square: local("chi-square", "卡方") };
  const LOOKS = {
    reverse: { stroke: "var(--kl-k2)" },
    forward: { stroke: "var(--kl-k3)", "stroke-dasharray": "2 3" },
    chi_square: { stroke: "var(--kl-exact)", "stroke-dasharray": "7 4" },
  };
  const MOST = 4, NEAR = 0.2, BETAS = Array.from({ length: 31 }, (_, i) => 10 ** (1.5 - i / 10));
  const PRESETS = {
    [local("Light tail, harmless", "轻尾，无害")]: { tail: 0, harm: 0 },
    [local("Light tail, harmful", "轻尾，有害")]: { tail: 0, harm: 1.2 },
    [local("Heavy tail, harmless", "重尾，无害")]: { tail: 0.5, harm: 0 },
    [local("Heavy tail, harmful", "重尾，有害")]: { tail: 0.5, harm: 0.3 },
  };
  const beta = () => 10 ** state.power;

  const sliders = {
    tail: slider({
      label: local("tail of the error", "误差的尾部"), min: 0, max: 0.5, step: 0.02, value: state.tail,
      shown: (v) => (v === 0 ? local("normal", "正态") : `${local("power", "幂")} ${number(1 + 1 / v)}`), change: (v) => set({ tail: v }),
    }),
    harm: slider({ label: local("harm per unit of error", "每单位误差的害处"), min: 0, max: 2, step: 0.1, value: state.harm, change: (v) => set({ harm: v }) }),
    power: slider({
      label: local("coefficient β", "系数 β"), min: -1.4, max: 1.5, step: 0.05, value: state.power,
      shown: (v) => number(10 ** v), change: (v) => set({ power: v }),
    }),
  };

  // The optima down the coefficients, with more of them where the next one would be far away.
  const trace = (world, name) => {
    const at = (b) => ({ beta: b, ...klMath.proxyPoint(world, name, b) });
    const found = [at(BETAS[0])];
    const reach = (next, depth) => {
      const last = found.at(-1);
      if (depth > 0 && last.kl <= MOST && next.kl - last.kl > NEAR) {
        reach(at(Math.sqrt(last.beta * next.beta)), depth - 1);
        if (found.at(-1).kl <= MOST) reach(next, depth - 1);
      } else found.push(next);
    };
    for (const b of BETAS.slice(1)) {
      if (found.at(-1).kl > MOST) break;
      reach(at(b), 7);
    }
    return found;
  };

  // The curves depend on the error alone; only the dots follow the coefficient.
  let known = {};
  const solve = () => {
    if (known.tail !== state.tail || known.harm !== state.harm) {
      const world = klMath.tailWorld(state.tail, state.harm);
      const start = { kl: 0, truth: klMath.sum(world.reference.map((p, a) => p * world.truth[a])), proxy: 0 };
      const curves = {};
      for (const name of Object.keys(NAMES)) {
        curves[name] = [start, ...trace(world, name)];
      }
      known = { tail: state.tail, harm: state.harm, world, curves, start };
    }
    const now = Object.fromEntries(Object.keys(NAMES).map((name) => [name, klMath.proxyPoint(known.world, name, beta())]));
    return { ...known, now };
  };

  const drawn = (value, label) => picture({
    label, height: 250,
    paint: (root, width, height) => {
      const { curves, now } = solve();
      const shown = Object.values(curves).flat().filter((point) => point.kl <= MOST).map((point) => point[value]);
      const low = Math.min(0, ...shown), high = Math.max(0.1, ...shown), room = 0.06 * (high - low);
      const { toX, toY } = panel(root, {
        width, height, x: [0, MOST], y: [low - room, high + room], xLabel: local("reverse KL to the reference (nats)", "到参考模型的反向 KL（nat）"), yLabel: label,
      });
      const box = svg("clipPath", { id: `kl-${value}` }, svg("rect", {
        x: toX(0), y: toY(high + room), width: toX(MOST) - toX(0), height: toY(low - room) - toY(high + room),
      }));
      root.append(box);
      for (const [name, points] of Object.entries(curves)) {
        line(root, points.map((point) => [toX(point.kl), toY(point[value])]),
          { "stroke-width": 2.5, "clip-path": `url(#kl-${value})`, ...LOOKS[name] });
        if (now[name].kl <= MOST) {
          root.append(svg("circle", { cx: toX(now[name].kl), cy: toY(now[name][value]), r: 5, fill: LOOKS[name].stroke }));
        }
      }
    },
  });
  const pictures = { truth: drawn("truth", local("true reward, mean", "真实奖励，均值")), proxy: drawn("proxy", local("proxy, mean", "代理，均值")) };

  const numbers = html("div");
  const verdict = html("p", { class: "kl-verdict", "aria-live": "polite" });
  const key = html("p", { class: "kl-key" }, ...Object.entries(NAMES).flatMap(([name, text]) => [
    html("span", { class: "kl-swatch", style: `background:${LOOKS[name].stroke}` }), `${text}  `,
  ]));

  const say = () => {
    const { curves, now, start } = solve();
    const peaks = Object.entries(curves).map(([name, points]) =>
      [name, points.filter((point) => point.kl <= MOST).reduce((one, other) => (other.truth > one.truth ? other : one))]);
    numbers.replaceChildren(table(local(`At a coefficient of ${number(beta())}; the reference's truth is ${number(start.truth)}.`, `系数为 ${number(beta())}；参考模型的真实奖励为 ${number(start.truth)}。`),
      ["", local("KL (nats)", "KL（nat）"), local("proxy", "代理"), local("truth", "真实"), local("most truth on the curve", "曲线上最高的真实"), local("at a KL of", "所在的 KL")],
      peaks.map(([name, peak]) => [NAMES[name], ...[now[name].kl, now[name].proxy, now[name].truth, peak.truth, peak.kl].map((v) => number(v))])));
    const worse = Object.keys(NAMES).filter((name) => now[name].truth < start.truth - 1e-9);
    verdict.textContent = worse.length
      ? local(`Worse than the reference by now, although the proxy has risen: ${worse.map((name) => NAMES[name]).join(", ")}.`,
        `代理虽然上升，现在已不如参考模型：${worse.map((name) => NAMES[name]).join("、")}。`)
      : local("None of the three has fallen below the reference.", "三者都没有低于参考模型。");
    for (const [value, shown] of Object.entries(pictures)) {
      shown.say(local(`${value === "truth" ? "True reward" : "Proxy"} over the KL, a line for each divergence. ${verdict.textContent}`,
        `${value === "truth" ? "真实奖励" : "代理"}随 KL 的变化，每种散度一条线。${verdict.textContent}`));
    }
  };

  const set = (changes) => {
    Object.assign(state, changes);
    for (const name of Object.keys(sliders)) sliders[name].set(state[name]);
    for (const shown of Object.values(pictures)) shown.draw();
    say();
  };

  place.append(
    html("div", { class: "kl-controls" },
      group(local("The proxy's error", "代理的误差"), sliders.tail.node, sliders.harm.node),
      group(local("The KL term", "KL 项"), sliders.power.node)),
    html("div", { class: "kl-row" }, ...Object.entries(PRESETS).map(([name, values]) => button(name, () => set(values)))),
    key, html("div", { class: "kl-pair" }, pictures.truth.node, pictures.proxy.node),
    verdict, numbers);
  set({});
});

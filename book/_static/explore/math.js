// The mathematics of the explorers, in float64: the functions of kl_term.kl and of three chapters under
// their own names. tests/book/test_explore_math.py compares every one of them with Python.
// A script with one global and no module: a browser loads no modules from a disk, and the book opens there.
"use strict";
globalThis.klMath = (() => {
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const dot = (left, right) => sum(left.map((value, i) => value * right[i]));
  const norm = (values) => Math.sqrt(dot(values, values));

  // --- Two Gaussians: kl_term.kl.gaussians and analysis.chapters.ch03_counterexample.ratio_tail --

  const gaussianKl = (qMean, qStd, pMean, pStd) =>
    Math.log(pStd / qStd) + (qStd ** 2 + (qMean - pMean) ** 2) / (2 * pStd ** 2) - 0.5;

  const gaussianChiSquare = (qMean, qStd, pMean, pStd) => {
    const spread = 2 * qStd ** 2 - pStd ** 2;
    if (!(spread > 0)) return Infinity;
    const logSecond = 2 * Math.log(qStd) - Math.log(pStd) - 0.5 * Math.log(spread);
    return Math.expm1(logSecond + (qMean - pMean) ** 2 / spread);
  };

  // E[(a + b z + c z^2)^power] of a standard normal z.
  const meanOfPower = (coefficients, power) => {
    let product = [1];
    for (let turn = 0; turn < power; turn++) {
      const longer = new Array(product.length + 2).fill(0);
      product.forEach((left, i) => coefficients.forEach((right, j) => { longer[i + j] += left * right; }));
      product = longer;
    }
    let total = 0, moment = 1;
    for (let degree = 0; degree < product.length; degree += 2) {
      total += product[degree] * moment;
      moment *= degree + 1;
    }
    return total;
  };

  const moments = (qMean, qStd, pMean, pStd) => {
    const shift = (qMean - pMean) / pStd, scale = qStd / pStd;
    const polynomial = [0.5 * shift ** 2 - Math.log(scale), shift * scale, 0.5 * (scale - 1) * (scale + 1)];
    const [l1, l2, l4] = [1, 2, 4].map((power) => meanOfPower(polynomial, power));
    const varK1 = polynomial[1] ** 2 + 2 * polynomial[2] ** 2;
    const symmetric = l1 + gaussianKl(pMean, pStd, qMean, qStd);
    const varK3 = Math.max(0, varK1 + gaussianChiSquare(qMean, qStd, pMean, pStd) - 2 * symmetric);
    return {
      k1: { mean: l1, var: varK1 },
      k2: { mean: l2 / 2, var: (l4 - l2 ** 2) / 4 },
      k3: { mean: l1, var: varK3 },
    };
  };

  const ratioTailIndex = (qStd, pStd) =>
    pStd > qStd ? pStd ** 2 / (pStd ** 2 - qStd ** 2) : Infinity;

  // The complementary error function: its series, or its continued fraction by Lentz's method.
  const erfc = (x) => {
    if (x < 0) return 2 - erfc(-x);
    if (x < 2.5) {
      let term = x, total = x;
      for (let n = 1; Math.abs(term) > 1e-18 * Math.abs(total); n++) {
        term *= (2 * x * x) / (2 * n + 1);
        total += term;
      }
      return 1 - (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * total;
    }
    let fraction = 0;
    for (let n = 200; n > 0; n--) fraction = n / 2 / (x + fraction);
    return Math.exp(-x * x) / (Math.sqrt(Math.PI) * (x + fraction));
  };

  const outside = (low, high, mean, std) => {
    const root = std * Math.SQRT2;
    return 0.5 * (erfc((mean - low) / root) + erfc((high - mean) / root));
  };

  // P(r > t) under q and under p, for a q narrower than p.
  const tailMass = (qMean, qStd, pMean, pStd, logThreshold) => {
    const q = qStd ** -2, p = pStd ** -2, excess = q - p;
    const centre = (q * qMean - p * pMean) / excess;
    const lowest = Math.log(qStd / pStd) - (q * p * (qMean - pMean) ** 2) / (2 * excess);
    const half = Math.sqrt(Math.max(0, (2 * (logThreshold - lowest)) / excess));
    if (half === 0) return { underQ: 1, underP: 1 };
    const [low, high] = [centre - half, centre + half];
    return { underQ: outside(low, high, qMean, qStd), underP: outside(low, high, pMean, pStd) };
  };

  const unseenMass = (qMean, qStd, pMean, pStd, sampleSize) => {
    const excess = (logT) => tailMass(qMean, qStd, pMean, pStd, logT).underQ - 1 / sampleSize;
    let low = -50, high = 1;
    while (excess(high) > 0) [low, high] = [high, 2 * high];
    for (let turn = 0; turn < 100; turn++) {
      const middle = (low + high) / 2;
      if (excess(middle) > 0) low = middle; else high = middle;
    }
    return tailMass(qMean, qStd, pMean, pStd, high).underP;
  };

  // Root mean square error of the mean of n samples, around the KL.
  const meanError = ({ mean, var: variance }, kl, sampleSize) =>
    Math.sqrt((mean - kl) ** 2 + variance / sampleSize);

  // --- One Gaussian for a mixture of two: analysis.chapters.ch10_dpo --------------------------------

  // The log-density of `weight` at `left` and the rest at `right`, both of width `std`, and its slopes in x.
  const mixtureLogDensity = ({ weight, left, right, std }, x) => {
    const logs = [[weight, left], [1 - weight, right]].map(([w, mean]) => Math.log(w) - 0.5 * ((x - mean) / std) ** 2);
    const most = Math.max(...logs), masses = logs.map((v) => Math.exp(v - most)), total = sum(masses);
    const ofLeft = masses[0] / total, gap = (right - left) / std ** 2;
    return {
      value: most + Math.log(total) - Math.log(std * Math.sqrt(2 * Math.PI)),
      slope: (ofLeft * left + (1 - ofLeft) * right - x) / std ** 2,
      curvature: ofLeft * (1 - ofLeft) * gap ** 2 - 1 / std ** 2,
    };
  };

  // Points and weights of the mean over a standard normal, by the trapezoid rule.
  const NORMAL = Array.from({ length: 481 }, (_, i) => {
    const z = (i - 240) / 24;
    return [z, Math.exp(-0.5 * z * z) / Math.sqrt(2 * Math.PI) / 24];
  });

  // KL of a Gaussian from the mixture, with its first and second derivatives in mean and log std.
  const klOfFit = (target, mean, logStd) => {
    const std = Math.exp(logStd);
    let value = -logStd - 0.5 * Math.log(2 * Math.PI * Math.E), dm = 0, ds = -1, dmm = 0, dms = 0, dss = 0;
    for (const [z, mass] of NORMAL) {
      const at = mixtureLogDensity(target, mean + std * z), reach = std * z;
      value -= mass * at.value;
      dm -= mass * at.slope;
      ds -= mass * at.slope * reach;
      dmm -= mass * at.curvature;
      dms -= mass * at.curvature * reach;
      dss -= mass * (at.curvature * reach * reach + at.slope * reach);
    }
    return { value, dm, ds, dmm, dms, dss };
  };

  // Newton's method, down the gradient where the curvature is not that of a minimum, never uphill.
  const reverseFit = (target, start) => {
    let mean = start, logStd = Math.log(target.std), at = klOfFit(target, mean, logStd);
    for (let turn = 0; turn < 200 && Math.hypot(at.dm, at.ds) > 1e-13; turn++) {
      const bowl = at.dmm * at.dss - at.dms ** 2;
      const newton = bowl > 0 && at.dmm > 0;
      const [dm, ds] = newton
        ? [(at.dss * at.dm - at.dms * at.ds) / bowl, (at.dmm * at.ds - at.dms * at.dm) / bowl]
        : [at.dm * target.std ** 2, at.ds];
      let size = 1, next = at;
      for (; size > 1e-9; size /= 2) {
        next = klOfFit(target, mean - size * dm, logStd - size * ds);
        if (next.value <= at.value + 1e-15) break;
      }
      if (!(size > 1e-9)) break;
      [mean, logStd, at] = [mean - size * dm, logStd - size * ds, next];
    }
    return { mean, std: Math.exp(logStd), kl: at.value };
  };

  // The Gaussians of least KL to the mixture: by its moments, and the better of the minima near the peaks.
  const gaussianFits = (target) => {
    const { weight, left, right, std } = target;
    const mean = weight * left + (1 - weight) * right;
    const spread = Math.sqrt(std ** 2 + weight * (1 - weight) * (right - left) ** 2);
    const found = [left, right].map((start) => reverseFit(target, start));
    return { forward: { mean, std: spread }, reverse: found[1].kl < found[0].kl ? found[1] : found[0] };
  };

  // The probability of a Gaussian above a place.
  const above = (place, { mean, std }) => 0.5 * erfc((place - mean) / (std * Math.SQRT2));

  // --- One state: kl_term.kl.surrogates, .divergences, .enumeration and .ascent -------------------

  const MAX_RATIO = 10;
  const GIVEN_UP = -600;

  const logSoftmax = (logits) => {
    const most = Math.max(...logits);
    const total = most + Math.log(sum(logits.map((z) => Math.exp(z - most))));
    return logits.map((z) => z - total);
  };
  const softmax = (logits) => logSoftmax(logits).map(Math.exp);

  const VALUES = {
    k1: (l) => l,
    k2: (l) => 0.5 * l * l,
    k3: (l) => Math.expm1(-l) + l,
    k3_clip: (l) => Math.min(Math.expm1(-l), MAX_RATIO - 1) + l,
    k4: (l) => Math.expm1(-l) + l,
  };
  const SLOPES = {
    k1: () => 1,
    k2: (l) => l,
    k3: (l) => -Math.expm1(-l),
    k3_clip: (l) => (-Math.expm1(-l) < 1 - MAX_RATIO ? 1 : -Math.expm1(-l)),
    k4: (l) => -Math.expm1(-l),
  };

  // The number beside the score of one sampled token.
  const sampleCoefficient = (logp, refLogp, oldLogp, { estimator, placement = "loss", weighting = "none" }) => {
    const weight = weighting === "none" ? 1 : Math.exp(logp - oldLogp);
    if (placement === "reward") return weight * VALUES[estimator](oldLogp - refLogp);
    const l = logp - refLogp;
    const slope = estimator === "minimax01" ? Math.exp(logp) - Math.exp(refLogp) : SLOPES[estimator](l);
    return weight * (slope + (weighting === "attached" ? VALUES[estimator](l) : 0));
  };

  const reverseKl = (logits, refLogits) => {
    const logp = logSoftmax(logits), refLogp = logSoftmax(refLogits);
    return sum(logp.map((lp, a) => Math.exp(lp) * (lp - refLogp[a])));
  };
  const forwardKl = (logits, refLogits) => reverseKl(refLogits, logits);

  const reverseKlGradient = (logits, refLogits) => {
    const logp = logSoftmax(logits), refLogp = logSoftmax(refLogits), kl = reverseKl(logits, refLogits);
    return logp.map((lp, a) => Math.exp(lp) * (lp - refLogp[a] - kl));
  };
  const forwardKlGradient = (logits, refLogits) => {
    const ref = softmax(refLogits);
    return softmax(logits).map((p, a) => p - ref[a]);
  };

  const gradientMoments = (logits, refLogits, oldLogits, term) => {
    const logp = logSoftmax(logits), refLogp = logSoftmax(refLogits), oldLogp = logSoftmax(oldLogits);
    const policy = logp.map(Math.exp), square = dot(policy, policy);
    const coefficient = logp.map((lp, a) => sampleCoefficient(lp, refLogp[a], oldLogp[a], term));
    const weighted = coefficient.map((c, a) => Math.exp(oldLogp[a]) * c);
    const total = sum(weighted);
    const mean = weighted.map((w, a) => w - policy[a] * total);
    const second = sum(weighted.map((w, a) => w * coefficient[a] * (1 - 2 * policy[a] + square)));
    return { mean, traceVar: second - dot(mean, mean) };
  };
  const expectedGradient = (...of) => gradientMoments(...of).mean;

  const cosine = (gradient, exact) => {
    const norms = norm(gradient) * norm(exact);
    return norms > 0 ? dot(gradient, exact) / norms : NaN;
  };
  const relativeError = (gradient, exact) => norm(gradient.map((g, i) => g - exact[i])) / norm(exact);

  // One step of the ascent along the exact expected gradient, the samples drawn afresh.
  const ascentStep = (logp, rewards, refLogits, { beta, stepSize = 0.5, geometry = "natural", ...term }) => {
    const refLogp = logSoftmax(refLogits);
    const credit = logp.map((lp, a) => rewards[a] - beta * sampleCoefficient(lp, refLogp[a], lp, term));
    const mean = sum(logp.map((lp, a) => Math.exp(lp) * credit[a]));
    const moved = logp.map((lp, a) => {
      const move = stepSize * (credit[a] - mean);
      return lp + (geometry === "natural" ? Math.min(1, Math.max(-1, move)) : Math.exp(lp) * move);
    });
    return logSoftmax(moved).map((lp) => Math.max(GIVEN_UP, lp));
  };
  const expectedAscent = (startLogits, rewards, refLogits, { steps = 1000, ...term }) => {
    let logp = logSoftmax(startLogits);
    for (let step = 0; step < steps; step++) logp = ascentStep(logp, rewards, refLogits, term);
    return logSoftmax(logp);
  };

  // --- Sequences: kl_term.kl.sequences and .prefix, with the same numbering of prefixes ----------

  const enumerateSequences = (vocabSize, maxLength) => {
    let live = [{ tokens: [], states: [] }], numStates = 0;
    for (let position = 0; position < maxLength; position++) {
      live = live.flatMap(({ tokens, states }) => {
        const state = numStates++;
        return Array.from({ length: vocabSize }, (_, token) => ({
          tokens: [...tokens, token], states: [...states, state],
        }));
      });
    }
    return { rows: live, numStates, vocabSize };
  };

  const tokenLogp = (table, sequences) => {
    const logp = table.map(logSoftmax);
    return sequences.rows.map(({ tokens, states }) => tokens.map((token, t) => logp[states[t]][token]));
  };

  const stateVisits = (table, sequences) => {
    const visits = new Array(sequences.numStates).fill(0);
    tokenLogp(table, sequences).forEach((row, n) => {
      const probability = Math.exp(sum(row));
      for (const state of sequences.rows[n].states) visits[state] += probability;
    });
    return visits;
  };

  const sequenceKl = (table, refTable, sequences) => {
    const refLogp = tokenLogp(refTable, sequences);
    return sum(tokenLogp(table, sequences).map((row, n) =>
      Math.exp(sum(row)) * (sum(row) - sum(refLogp[n]))));
  };

  // Sum over all sequences of probability times credit times score, by the table of logits.
  const creditGradient = (table, sequences, probability, credit) => {
    const policy = table.map(softmax);
    const gradient = table.map((row) => row.map(() => 0));
    sequences.rows.forEach(({ tokens, states }, n) => tokens.forEach((token, t) => {
      const share = probability[n] * credit[n][t];
      policy[states[t]].forEach((p, a) => {
        gradient[states[t]][a] += share * ((a === token ? 1 : 0) - p);
      });
    }));
    return gradient;
  };

  const toGo = (values) => {
    let owed = 0;
    return values.slice().reverse().map((value) => (owed += value)).reverse();
  };

  const sequenceKlGradient = (table, refTable, sequences) => {
    const logp = tokenLogp(table, sequences), refLogp = tokenLogp(refTable, sequences);
    const credit = logp.map((row, n) => toGo(row.map((lp, t) => lp - refLogp[n][t])));
    return creditGradient(table, sequences, logp.map((row) => Math.exp(sum(row))), credit);
  };

  const visitedKlGradient = (table, refTable, sequences, oldTable) => {
    const visits = stateVisits(oldTable, sequences);
    return table.map((row, s) => reverseKlGradient(row, refTable[s]).map((g) => visits[s] * g));
  };

  // The sampled term over whole sequences: in the loss with a token's or the prefix ratio, in the
  // reward to go or immediate, weighted with the token's ratio where a weighting is named.
  const expectedSequenceGradient = (table, refTable, sequences, oldTable, term) => {
    const { estimator, placement = "loss", weighting = "none", ratio = "token", credit = "to_go" } = term;
    const logp = tokenLogp(table, sequences), refLogp = tokenLogp(refTable, sequences);
    const oldLogp = tokenLogp(oldTable, sequences);
    const credits = logp.map((row, n) => {
      const logRatio = row.map((lp, t) => lp - oldLogp[n][t]);
      let running = 0;
      const weights = logRatio.map((own) => {
        running = ratio === "prefix" ? running + own : own;
        return weighting === "none" ? 1 : Math.exp(running);
      });
      const value = VALUES[estimator];
      if (placement === "reward") {
        const owed = row.map((_, t) => value(oldLogp[n][t] - refLogp[n][t]));
        return (credit === "to_go" ? toGo(owed) : owed).map((cost, t) => weights[t] * cost);
      }
      const l = row.map((lp, t) => lp - refLogp[n][t]);
      const own = l.map((lt, t) => weights[t] * SLOPES[estimator](lt));
      if (weighting !== "attached") return own;
      const cost = l.map((lt, t) => weights[t] * value(lt));
      const owed = ratio === "prefix" ? toGo(cost) : cost;
      return own.map((c, t) => c + owed[t]);
    });
    return creditGradient(table, sequences, oldLogp.map((row) => Math.exp(sum(row))), credits);
  };

  // --- A proxy and the truth: kl_term.kl.fixed_points and analysis.chapters.ch22_proxy --------------

  const normalized = (weights) => { const total = sum(weights); return weights.map((w) => w / total); };

  const reverseKlOptimum = (rewards, reference, beta) =>
    softmax(rewards.map((r, a) => Math.log(reference[a]) + r / beta));

  // Newton's method from the left for how far the multiplier exceeds the best reward.
  const forwardKlOptimum = (rewards, reference, beta) => {
    const best = rewards.reduce((one, other) => Math.max(one, other));
    const gaps = rewards.map((r) => best - r);
    let alone = -Infinity, jensen = beta;
    reference.forEach((p, a) => { alone = Math.max(alone, beta * p - gaps[a]); jensen -= p * gaps[a]; });
    let excess = Math.max(alone, jensen, 1e-300);
    for (let turn = 0; turn < 1100; turn++) {
      let total = 0, slope = 0;
      for (let a = 0; a < gaps.length; a++) {
        const term = (beta * reference[a]) / (excess + gaps[a]);
        total += term;
        slope += term / (excess + gaps[a]);
      }
      const step = (total - 1) / slope;
      if (!(step > 1e-16 * excess)) break;
      excess += step;
    }
    return normalized(reference.map((p, a) => p / (excess + gaps[a])));
  };

  // With the best m kept, 1 + (R - lambda) / beta is `level` - gap / beta.
  const chiSquareOptimum = (rewards, reference, beta) => {
    const best = rewards.reduce((one, other) => Math.max(one, other));
    const order = rewards.map((_, a) => a).sort((a, b) => rewards[b] - rewards[a]);
    let mass = 0, behind = 0, level = 0;
    for (const a of order) {
      const gap = best - rewards[a];
      const next = (1 + (behind + reference[a] * gap) / beta) / (mass + reference[a]);
      if (!(next > gap / beta)) break;
      mass += reference[a];
      behind += reference[a] * gap;
      level = next;
    }
    return reference.map((p, a) => p * Math.max(0, level - (best - rewards[a]) / beta));
  };

  const OPTIMA = { reverse: reverseKlOptimum, forward: forwardKlOptimum, chi_square: chiSquareOptimum };

  const linspace = (low, high, count) => Array.from({ length: count }, (_, i) => low + (i * (high - low)) / (count - 1));

  const tailWorld = (tail, harm) => {
    const truths = linspace(-3, 3, 21), errors = linspace(-12, 12, 121);
    const normal = (values) => normalized(values.map((x) => Math.exp(-0.5 * x * x)));
    const law = tail > 0 ? normalized(errors.map((e) => (1 + tail * e * e) ** (-(1 / tail + 1) / 2))) : normal(errors);
    const mass = normal(truths);
    const reference = [], truth = [], proxy = [];
    truths.forEach((t, i) => errors.forEach((e, j) => {
      reference.push(mass[i] * law[j]);
      truth.push(t - harm * Math.max(0, e));
      proxy.push(t + e);
    }));
    return { reference, truth, proxy };
  };

  // The optimum of proxy minus beta times a divergence: its reverse KL, and both rewards there.
  const proxyPoint = ({ reference, truth, proxy }, divergence, beta) => {
    const policy = OPTIMA[divergence](proxy, reference, beta);
    const kl = sum(policy.map((p, a) => (p > 0 ? p * Math.log(p / reference[a]) : 0)));
    return { kl, truth: dot(policy, truth), proxy: dot(policy, proxy) };
  };

  // --- Recorded runs: analysis.records.statistics ---------------------------------------------

  // Mean over runs and its t interval; `quantile` is that of Student's t with one degree fewer.
  const interval = (values, quantile) => {
    const mean = sum(values) / values.length;
    if (quantile === undefined) return { mean, low: NaN, high: NaN };
    const spread = sum(values.map((value) => (value - mean) ** 2)) / (values.length - 1);
    const reach = quantile * Math.sqrt(spread / values.length);
    return { mean, low: mean - reach, high: mean + reach };
  };
  const range = (values) =>
    ({ mean: sum(values) / values.length, low: Math.min(...values), high: Math.max(...values) });

  return {
    sum, norm, gaussianKl, gaussianChiSquare, moments, ratioTailIndex, erfc, tailMass, unseenMass, meanError,
    mixtureLogDensity, gaussianFits, above,
    logSoftmax, softmax, sampleCoefficient, reverseKl, forwardKl, reverseKlGradient, forwardKlGradient,
    gradientMoments, expectedGradient, cosine, relativeError, ascentStep, expectedAscent,
    enumerateSequences, stateVisits, sequenceKl, sequenceKlGradient, visitedKlGradient,
    expectedSequenceGradient, reverseKlOptimum, forwardKlOptimum, chiSquareOptimum, tailWorld, proxyPoint,
    interval, range,
  };
})();

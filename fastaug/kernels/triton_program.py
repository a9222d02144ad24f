"""The objective of one image and its gradient, as a Triton program. Imported only on first use.

Names: z logits, p probabilities and lp log-probabilities of a view, [K, C]; q the smoothed target.
    u_c = mean_k lp_kc    r_c = exp(u_c)    d_kc = lp_kc - u_c    x_kc = p_kc - r_c
    kl  = 1/(K-1) sum_kc x_kc d_kc, in which no term is negative
    nll = -sum_c q_c s_c; s_c is u_c if losses are averaged, log mean_k p_kc if probabilities,
          u_c - log sum_c exp(u_c) if logits
    v_kc = d(nll + kl_weight kl)/d lp_kc,    gradient_kc = v_kc - p_kc sum_c v_kc

All arithmetic is fp32. A tile has all views of one image and TILE of its classes. If that is all of
them, logits are read once and nothing is computed twice; else tiles are streamed three times: for
the sums of exp(z), for the values and the sums of v, and for the gradient.

Views beyond K, which pad the tile to a power of two, hold finite numbers that no sum includes.
Classes beyond C are -inf, as is a class that the caller masked: they contribute nothing.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

INF = tl.constexpr(float("inf"))


@triton.jit(
    do_not_specialize=["image_stride", "view_stride", "out_image_stride", "out_view_stride"]
)
def objective_program(
    logits: tl.tensor,
    targets: tl.tensor,
    nll: tl.tensor,
    kl: tl.tensor,
    gradient: tl.tensor,
    image_stride: tl.int64,
    view_stride: tl.int64,
    out_image_stride: tl.int64,
    out_view_stride: tl.int64,
    kl_weight: tl.float32,
    smoothing: tl.float32,
    AVERAGE: tl.constexpr,
    SOFT: tl.constexpr,
    KL_SLOPE: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    K_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Program b: logits [b, K, C] -> nll [b], kl [b], gradient [b, K, C] unless it is None.

    AVERAGE: "losses", "probs", "logits", or None for the regularizer only, without targets.
    SOFT: targets are [B, C] fp32 with any sums, not [B] int64.
    KL_SLOPE: True if the KL is part of the gradient. With weight 0 it must not be: its slope may
    be infinite, and 0 * inf is NaN.
    Strides are in units of ALIGNED elements, so that the compiler knows how many to load at once.
    """
    image = tl.program_id(0).to(tl.int64)
    view = tl.arange(0, K_PADDED).to(tl.int64)
    column = tl.arange(0, TILE)
    rows = logits + image * (image_stride * ALIGNED) + view * (view_stride * ALIGNED)

    # log sum_c exp(z_kc) of each view, as its largest logit and the log of the remaining factor.
    if C <= TILE:
        z = _load(rows, column, K, C)
        top = tl.max(z, 1)
        log_sum = tl.log(tl.sum(tl.exp(z - top[:, None]), 1))
    else:
        top = tl.full([K_PADDED], -INF, tl.float32)
        total = tl.zeros([K_PADDED], tl.float32)
        for first in range(0, C, TILE):
            z = _load(rows, first + column, K, C)
            larger = tl.maximum(top, tl.max(z, 1))
            shift = _finite(larger)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift[:, None]), 1)
            top = larger
        log_sum = tl.log(total)
    # The same above the largest logit of view 0: exact under an offset that is common to all.
    base = tl.sum(tl.where(view == 0, top, 0.0), 0)
    offset = (top - base) + log_sum
    mean_offset = _mean_of_views(offset, K)

    if C <= TILE:
        q = _smoothed_target(targets, image, column, smoothing, AVERAGE, SOFT, C)
        p, v, u, kl_terms, score = _columns(
            z, q, top, log_sum, offset, base, mean_offset, kl_weight, AVERAGE, KL_SLOPE, K
        )
        scores = _weighted(q, score, SOFT)
        q_total = q
        v_sum = tl.sum(v, 1)
        u_top = u
        u_total = tl.full([TILE], 1.0, tl.float32)
    else:
        kl_terms = tl.zeros([TILE], tl.float32)
        scores = tl.zeros([TILE], tl.float32)
        q_total = tl.zeros([TILE], tl.float32)
        v_sum = tl.zeros([K_PADDED], tl.float32)
        u_top = tl.full([TILE], -INF, tl.float32)
        u_total = tl.zeros([TILE], tl.float32)
        for first in range(0, C, TILE):
            z = _load(rows, first + column, K, C)
            q = _smoothed_target(targets, image, first + column, smoothing, AVERAGE, SOFT, C)
            p, v, u, more_kl, score = _columns(
                z, q, top, log_sum, offset, base, mean_offset, kl_weight, AVERAGE, KL_SLOPE, K
            )
            kl_terms += more_kl
            scores += _weighted(q, score, SOFT)
            if gradient is not None:
                v_sum += tl.sum(v, 1)
            if AVERAGE == "logits":
                larger = tl.maximum(u_top, u)
                shift = _finite(larger)
                u_total = u_total * tl.exp(u_top - shift) + tl.exp(u - shift)
                u_top = larger
                if SOFT:
                    q_total += q

    # log sum_c exp(u_c) and sum_c q_c, where logits are averaged
    log_total = 0.0
    q_sum = 1.0
    at_origin = 0.0  # nll if all u were 0
    if AVERAGE == "logits":
        largest = tl.max(u_top, 0)
        log_total = largest + tl.log(tl.sum(u_total * tl.exp(u_top - largest), 0))
        at_origin = log_total
        if SOFT:
            q_sum = tl.sum(q_total, 0)
            at_origin = q_sum * log_total
    tl.store(nll + image, at_origin - tl.sum(scores, 0))
    tl.store(kl + image, tl.sum(kl_terms, 0) / max(1, K - 1))

    if gradient is not None:
        out = gradient + image * (out_image_stride * ALIGNED) + view * (out_view_stride * ALIGNED)
        if C <= TILE:
            _store_gradient(out, column, p, v, v_sum, u, q, q_sum, log_total, AVERAGE, SOFT, K, C)
        else:
            for first in range(0, C, TILE):
                z = _load(rows, first + column, K, C)
                q = _smoothed_target(targets, image, first + column, smoothing, AVERAGE, SOFT, C)
                p, v, u, _, _ = _columns(
                    z, q, top, log_sum, offset, base, mean_offset, kl_weight, AVERAGE, KL_SLOPE, K
                )
                _store_gradient(
                    out, first + column, p, v, v_sum, u, q, q_sum, log_total, AVERAGE, SOFT, K, C
                )


@triton.jit
def _columns(
    z: tl.tensor,
    q: tl.tensor,
    top: tl.tensor,
    log_sum: tl.tensor,
    offset: tl.tensor,
    base: tl.tensor,
    mean_offset: tl.tensor,
    kl_weight: tl.tensor,
    AVERAGE: tl.constexpr,
    KL_SLOPE: tl.constexpr,
    K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """p, v: [K, TILE]; u, the terms of (K-1) kl, and s without log sum_c exp(u_c): [TILE]."""
    # Differences to the largest of the views are exact where views are close, whatever the logits
    # have in common. Differences to their mean would be as good, but it is rounded.
    best = tl.max(_mask_views(z, -INF, K), 0)
    difference = z - best[None, :]
    mean_difference = tl.where(best == -INF, 0.0, _mean_of_views(difference, K))
    u = ((best - base) + mean_difference) - mean_offset
    r = tl.exp(u)[None, :]
    lp = (z - top[:, None]) - log_sum[:, None]
    p = tl.exp(lp)

    # A class at -inf in all views takes no part; in some views only, the KL is truly infinite.
    d = (difference - mean_difference[None, :]) - (offset - mean_offset)[:, None]
    d = tl.where(z == -INF, 0.0, d)
    x = tl.where(tl.abs(d) < 0.5, r * _small_expm1(d), p - r)
    kl_terms = _sum_of_views(x * d, K)

    v = tl.zeros_like(p)
    if KL_SLOPE:
        v = kl_weight / (K - 1) * (p * d + (x - _mean_of_views(x, K)[None, :]))
    score = u
    if AVERAGE == "losses":
        v -= (q / K)[None, :]
    elif AVERAGE == "probs":
        # Through the largest of the views: exp would underflow at a logit gap of 200.
        largest = _finite(tl.max(_mask_views(lp, -INF, K), 0))
        share = tl.exp(lp - largest[None, :])
        mean_share = _mean_of_views(share, K)
        score = largest + tl.log(mean_share)
        ratio = tl.where(mean_share == 0.0, 1.0, share * (1 / mean_share)[None, :])
        v -= (q / K)[None, :] * ratio
    return p, v, u, kl_terms, score


@triton.jit
def _weighted(q: tl.tensor, score: tl.tensor, SOFT: tl.constexpr) -> tl.tensor:
    """q * score, where 0 * -inf is 0."""
    absent = q == 0.0
    if SOFT:  # all of q may be 0, and a NaN must not be lost
        absent = absent & (score == -INF)
    return tl.where(absent, 0.0, q * score)


@triton.jit
def _store_gradient(
    rows: tl.tensor,
    column: tl.tensor,
    p: tl.tensor,
    v: tl.tensor,
    v_sum: tl.tensor,
    u: tl.tensor,
    q: tl.tensor,
    q_sum: tl.tensor,
    log_total: tl.tensor,
    AVERAGE: tl.constexpr,
    SOFT: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
) -> None:
    value = v - p * v_sum[:, None]
    if AVERAGE == "logits":  # the same for all views, and in terms of z already
        g = tl.exp(u - log_total)
        if SOFT:
            g *= q_sum
        value += ((g - q) / K)[None, :]
    view = tl.arange(0, rows.shape[0])
    inside = (view < K)[:, None] & (column < C)[None, :]
    tl.store(rows[:, None] + column[None, :], value, inside)


@triton.jit
def _load(rows: tl.tensor, column: tl.tensor, K: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """z: [K, TILE] fp32."""
    view = tl.arange(0, rows.shape[0])[:, None]
    inside = (view < K) & (column < C)[None, :]
    outside = tl.where(view < K, -INF, 0.0)
    return tl.load(rows[:, None] + column[None, :], inside, outside).to(tl.float32)


@triton.jit
def _smoothed_target(
    targets: tl.tensor,
    image: tl.tensor,
    column: tl.tensor,
    smoothing: tl.tensor,
    AVERAGE: tl.constexpr,
    SOFT: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """q: [TILE]; NaN for a target that is not a class, so that nll and gradient are NaN."""
    if AVERAGE is None:
        q = tl.zeros_like(column).to(tl.float32)
    elif SOFT:
        target = tl.load(targets + image * C + column, column < C, 0.0)
        q = tl.where(column < C, target * (1 - smoothing) + smoothing / C, 0.0)
    else:
        target = tl.load(targets + image)
        other = tl.where((target >= 0) & (target < C), smoothing / C, float("nan"))
        q = other + tl.where(column == target, 1 - smoothing, 0.0)
        q = tl.where(column < C, q, 0.0)
    return q


@triton.jit
def _small_expm1(d: tl.tensor) -> tl.tensor:
    """exp(d) - 1 for |d| < 0.5 to the last digit: the first term left out is below 2e-8 of it."""
    series = tl.fma(d, 1 / 40320, 1 / 5040)
    series = tl.fma(d, series, 1 / 720)
    series = tl.fma(d, series, 1 / 120)
    series = tl.fma(d, series, 1 / 24)
    series = tl.fma(d, series, 1 / 6)
    series = tl.fma(d, series, 1 / 2)
    return tl.fma(d, d * series, d)


@triton.jit
def _mask_views(values: tl.tensor, other: tl.constexpr, K: tl.constexpr) -> tl.tensor:
    if values.shape[0] != K:
        view = tl.arange(0, values.shape[0])
        if len(values.shape) == 2:
            view = view[:, None]
        values = tl.where(view < K, values, other)
    return values


@triton.jit
def _sum_of_views(values: tl.tensor, K: tl.constexpr) -> tl.tensor:
    return tl.sum(_mask_views(values, 0.0, K), 0)


@triton.jit
def _mean_of_views(values: tl.tensor, K: tl.constexpr) -> tl.tensor:
    return _sum_of_views(values, K) * (1 / K)


@triton.jit
def _finite(top: tl.tensor) -> tl.tensor:
    """The shift before exp: 0 where all values are -inf, because -inf - -inf is NaN."""
    return tl.where(top == -INF, 0.0, top)

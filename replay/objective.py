"""What a training step optimises, as values that a run can store.

Knows the two ways a loss can treat tokens that an older policy sampled; does not know tensors or trainers.
Law: every log-probability of the older policy is the one stored when the token was sampled, never computed again.

The advantage A of a token was earned under the behaviour policy b that sampled it; the step improves the policy p.
Both forms are sums over the trained tokens, divided by their one count over the whole step.

`Clip`, for fresh rows. Schulman et al., "Proximal Policy Optimization Algorithms", 2017, eq. 7, with r = p / b:

    loss = -min(r A, clip(r, 1 - low, 1 + high) A)

`Correction`, for history. With w a constant (no gradient flows through it) and p' the policy as it is before the step:

    loss = -w A p / p'          gradient = -w A grad(log p)

    token       w_t = min(cap, p'_t / b_t)                          each token by its own ratio
    sequence    w   = min(cap, product over the row of p'_t / b_t)  one weight for all trained tokens of a row

The untruncated weights are importance sampling's, per decision and per sequence (Precup, Sutton and Singh, "Eligibility
Traces for Off-Policy Policy Evaluation", 2000). Truncating them trades a bias for a bounded variance (Ionides,
"Truncated Importance Sampling", 2008); per token it is how IMPALA learns from actors that lag behind (Espeholt et al.,
2018, eq. 4, its c-bar and rho-bar).

Per token, the drift of the tokens before is left out: a small bias, with weights near one. Per sequence, nothing is
left out but the truncated part; the weight of a long row is a product of many ratios and soon far from one. A rollout
that became several rows (a rewrite, a branch) has one weight a row, over the tokens that train in that row: a call
shared by two rows counts in the one that trains it, so that the untruncated weights of a rollout's rows multiply to
the weight of the whole rollout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

CorrectionKind = Literal["none", "token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Range of the probability ratio, policy over behaviour: [1 - low, 1 + high]."""

    low: float = 0.2
    high: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How a step weighs tokens that an older policy sampled; `none` leaves it to `Clip`.

    >>> Correction(kind="sequence", cap=0.0)
    Traceback (most recent call last):
    ValueError: cap 0.0 is not a finite number above 0: give the largest weight that a token may get, such as 2.0
    """

    kind: CorrectionKind = "none"
    cap: float = 2.0
    """The largest weight; not used by `none`."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(CorrectionKind):
            raise ValueError(
                f"{self.kind!r} is not a kind of correction: use one of {', '.join(get_args(CorrectionKind))}"
            )
        if not (math.isfinite(self.cap) and self.cap > 0):
            raise ValueError(
                f"cap {self.cap} is not a finite number above 0: "
                "give the largest weight that a token may get, such as 2.0"
            )

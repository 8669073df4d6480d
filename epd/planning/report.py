"""Writes the answer to a buyer's question: a record, and one HTML page without anything to load."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from epd.errors import InfeasibleError
from epd.planning.offers import EXPECTED_ERROR, Offer
from epd.planning.question import demands


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds compared fleets.

    offers: the best first
    rate_per_s: that is asked for, None for as many as each serves
    what_ifs: changes, each with the best fleet's offer then
    """

    model: str
    question: str
    offers: tuple[Offer, ...]
    rate_per_s: float | None
    what_ifs: tuple[tuple[str, Offer], ...] = ()

    @property
    def best(self) -> Offer:
        return self.offers[0]

    @property
    def demands(self) -> list[str]:
        """Returns what a request is, and what the rate asks of threads and networks."""
        plan = self.best.plans[0]
        return demands(plan.demand.jobs, self.rate_per_s or self.best.goodput)

    @property
    def conclusion(self) -> str:
        """Returns what to take, in a sentence."""
        best = self.best
        rate = f"{60 * best.goodput:.3g} requests a minute"
        if self.rate_per_s is None:
            return f"take {best.name}: it serves {rate} at {_cost(best)} per thousand"
        if not best.serves(self.rate_per_s):
            return (
                f"none serves {60 * self.rate_per_s:.3g} requests a minute; {best.name} comes closest, {rate}"
            )
        each, whole = (
            shown_price(price, best.currency) for price in (self.asked_cost(best), best.price_per_hour)
        )
        return (
            f"take {best.name} at {whole} an hour, {each} per thousand requests: of "
            f"{60 * self.rate_per_s:.3g} a minute asked for, it could serve {60 * best.goodput:.3g}"
        )

    @property
    def advice(self) -> list[str]:
        """Returns what a buyer would overlook: threads that decide, and more devices than are asked for."""
        best, lines = self.best, []
        if all(plan.is_bound_by_threads for offer in self.offers for plan in offer.plans):
            lines.append(
                "no fleet is limited by its devices, but by CPU threads that read media. Their numbers are "
                "assumptions: say yours with --cpu-threads"
            )
        if len(best.plans) == 1 and self.rate_per_s and best.goodput >= 2 * self.rate_per_s:
            device, num = best.plans[0].profile.device, best.plans[0].num_devices
            enough = math.ceil(num * self.rate_per_s / best.goodput)
            lines.append(
                f"about {enough} of the {num} would do: --fleet {device} plans as many as are needed"
            )
        return lines

    def asked_cost(self, offer: Offer) -> float | None:
        """Returns the price of a thousand requests at the rate asked for; None where it is not served."""
        price = offer.price_per_hour
        if price is None or not self.rate_per_s or not offer.serves(self.rate_per_s):
            return None
        return price / self.rate_per_s / 3.6

    @property
    def what_if_lines(self) -> list[str]:
        return [f"with {change}: {_outcome(offer)}" for change, offer in self.what_ifs]

    def check(self) -> None:
        """Raises InfeasibleError where no fleet serves the rate that is asked for."""
        if not self.best.serves(self.rate_per_s):
            plan = self.best.plans[0]
            raise InfeasibleError(f"{self.conclusion}: {plan.binding.what} bind; {plan.binding.cure}")

    def record(self) -> dict[str, Any]:
        """Returns the record that `--json` prints; `plans` are those of `epd plan --out`."""
        return {
            "model": self.model,
            "question": self.question,
            "demands": self.demands,
            "asked_per_s": self.rate_per_s,
            "conclusion": self.conclusion,
            "advice": self.advice,
            "offers": [offer.record() for offer in self.offers],
            "what_ifs": [{"change": change, **offer.record()} for change, offer in self.what_ifs],
            "expected_error": EXPECTED_ERROR,
            "plans": [plan.record() for plan in self.best.plans],
        }


def shown_price(price: float | None, currency: str) -> str:
    """Returns a price for people; `unknown` without one."""
    return "unknown" if price is None else f"{price:.4g} {currency}"


def _cost(offer: Offer) -> str:
    return shown_price(offer.cost_per_thousand, offer.currency)


def _outcome(offer: Offer) -> str:
    if not offer.plans:
        return offer.reason
    price = shown_price(offer.price_per_hour, offer.currency)
    return f"{offer.name}, {price} an hour, {60 * offer.goodput:.3g} requests a minute"


LEGEND = (
    "A layout counts workers by what they do: 2e1p1d are two that encode media, one that reads prompts "
    "(prefill) and one that writes answers (decode); 8epd are eight that do it all. Prices are of a thousand "
    "requests at the rate that is asked for, and with all devices busy."
)
_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
body{color:#1b1f24;background:#fff}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}
th,td{padding:.35rem .6rem;border-bottom:1px solid #d5dae0;text-align:left}
td:first-child{white-space:nowrap}tr.best{background:#e8f2ff;font-weight:600}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
p.take{font-size:1.2rem;font-weight:600}svg{width:100%;height:auto}li{margin:.2rem 0}
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 340, 70, 50, 20, 150


def page(answer: Answer) -> str:
    """Returns the page: the question, what to take, a picture of the fleets, a table, reasons and errors."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Plan for {escape(answer.model)}</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>
<h1>Devices for {escape(answer.model)}</h1>
<p>Asked: {escape(answer.question)}.</p>
<p class="take">{escape(_sentence(answer.conclusion))}</p>
{_list([*answer.advice, *answer.demands])}
<h2>Served, by price</h2>
{_picture(answer)}
<h2>Fleets, the best first</h2>
<table><tr><th>fleet<th>layout<th class="n">requests/min<th class="n">price/h<th class="n">1,000 as asked\
<th class="n">1,000 if full<th class="n">kW<th>busiest</tr>
{"".join(_rows(answer))}</table>
<p>{LEGEND}</p>
<h2>Reasons</h2>
{_list(_reasons(answer))}
<h2>What these figures rest on</h2>
{_list([EXPECTED_ERROR, *answer.best.plans[0].assumptions])}
</body></html>
"""


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _list(lines: list[str]) -> str:
    items = "".join(f"<li>{escape(_sentence(line))}</li>\n" for line in lines)
    return f"<ul>\n{items}</ul>"


def _reasons(answer: Answer) -> list[str]:
    lines = []
    for plan in answer.best.plans:
        turns = f"; {plan.turns}" if plan.turns else ""
        lines += [f"{plan.num_devices} x {plan.profile.device}: {plan.told_verdict}{turns}"]
        lines += [f"for more, {plan.binding.cure}"]
    lines += [f"{offer.name}: {offer.reason}" for offer in answer.offers if offer.reason]
    return lines + answer.what_if_lines


def _rows(answer: Answer) -> Iterator[str]:
    for offer in answer.offers:
        best = ' class="best"' if offer is answer.best else ""
        if not offer.plans:
            yield f"<tr{best}><td>{escape(offer.name)}<td>none<td colspan=6>{escape(offer.reason)}</tr>\n"
            continue
        power = "" if offer.power_kw is None else f"{offer.power_kw:.3g}"
        price = shown_price(offer.price_per_hour, offer.currency)
        cost = answer.asked_cost(offer)
        asked = "" if cost is None else shown_price(cost, offer.currency)
        yield (
            f"<tr{best}><td>{escape(offer.name)}<td>{escape(offer.layout)}"
            f'<td class="n">{60 * offer.goodput:.3g}<td class="n">{escape(price)}'
            f'<td class="n">{escape(asked)}'
            f'<td class="n">{escape(_cost(offer))}<td class="n">{power}'
            f"<td>{escape(', '.join(plan.binding.what for plan in offer.plans))}</tr>\n"
        )


def _picture(answer: Answer) -> str:
    """Returns an SVG: a dot for each fleet, its requests a minute over its price, and a line at the rate."""
    shown = [
        (offer, offer.price_per_hour or 0.0, 60 * offer.goodput) for offer in answer.offers if offer.plans
    ]
    asked = 60 * answer.rate_per_s if answer.rate_per_s else 0.0
    most_price = _above(max(price for _, price, _ in shown))
    most_rate = _above(max(asked, *(rate for _, _, rate in shown)))
    across = (_WIDTH - _LEFT - _RIGHT) / most_price
    up = (_HEIGHT - _TOP - _BOTTOM) / most_rate
    parts = [_axes(most_price, most_rate, answer.best.currency)]
    if asked:
        y = _HEIGHT - _BOTTOM - asked * up
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#b54708" '
            f'stroke-dasharray="6 4"/><text x="{_LEFT + 6}" y="{y - 6:.1f}" fill="#b54708">asked: '
            f"{asked:.3g} a minute</text>"
        )
    for offer, price, rate in shown:
        x, y = _LEFT + price * across, _HEIGHT - _BOTTOM - rate * up
        colour = "#0a5cd6" if offer is answer.best else "#6b7480"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="{colour}"/>'
            f'<text x="{x + 11:.1f}" y="{y + 5:.1f}" fill="{colour}">{escape(offer.name)}</text>'
        )
    label = "Requests a minute over the price of an hour"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}" '
        f'font-family="system-ui,sans-serif" font-size="13">{"".join(parts)}</svg>'
    )


def _above(value: float) -> float:
    """Returns a round number above a value, whose quarters are round too."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(step * power for step in (1, 2, 4, 8, 10, 20) if step * power > 1.02 * value)


def _axes(most_price: float, most_rate: float, currency: str) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    ticks = ""
    for step in range(5):
        x = _LEFT + (right - _LEFT) * step / 4
        y = bottom - (bottom - _TOP) * step / 4
        ticks += (
            f'<text x="{x:.0f}" y="{bottom + 20}" text-anchor="middle" fill="#444">'
            f"{most_price * step / 4:.3g}</text>"
            f'<text x="{_LEFT - 8}" y="{y + 4:.0f}" text-anchor="end" fill="#444">'
            f"{most_rate * step / 4:.3g}</text>"
            f'<line x1="{_LEFT}" x2="{right}" y1="{y:.0f}" y2="{y:.0f}" stroke="#e6e9ed"/>'
        )
    return (
        f'{ticks}<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#444"/>'
        f'<text x="{(_LEFT + right) / 2:.0f}" y="{_HEIGHT - 8}" text-anchor="middle" fill="#222">'
        f"{escape(currency)} an hour</text>"
        f'<text transform="translate(16 {(_TOP + bottom) / 2:.0f}) rotate(-90)" text-anchor="middle" '
        'fill="#222">requests a minute</text>'
    )

"""Prints plans, and answers that compare fleets."""

from __future__ import annotations

from rich.table import Table

from epd import console
from epd.planning.offers import EXPECTED_ERROR, Offer
from epd.planning.plan import Plan
from epd.planning.report import Answer, shown_price


def print_plan(found: Plan) -> None:
    """Prints a plan, then its assumptions."""
    out, winner = console.stdout_console(), found.winner
    cells = f" ({', '.join(map(str, found.cells))})" if len(found.cells) > 1 or found.num_cells > 1 else ""
    out.print(f"run {found.topology}{cells}: {winner.candidate.settings}")
    kept = "that are kept up with" if found.demand.slo.is_empty else "within the objectives"
    out.print(f"  {found.goodput:.3g} requests/s {kept}, {found.per_device:.3g} per device")
    if found.cost_per_thousand is not None:
        price = shown_price(found.profile.price_per_hour, found.profile.currency)
        cost = shown_price(found.cost_per_thousand, found.profile.currency)
        out.print(f"  {cost} per thousand requests, at {price} per device and hour")
    binding = found.binding
    out.print(f"  busiest: {binding.what}, {binding.load(winner.goodput):.0%}; for more, {binding.cure}")
    for worker in found.memory:
        out.print(f"  memory of {worker}")
    out.print(found.verdict + (f"; {found.turns}" if found.turns else ""))
    _print_others(found)
    out.print(
        f"{found.search.num_candidates} candidates, {found.search.num_simulated} simulated; assumptions:"
    )
    for line in (*found.assumptions, EXPECTED_ERROR):
        out.print(f"  {line}")


def _print_others(found: Plan) -> None:
    """Prints the runners-up, plain replicas and goodput by number of encoders."""
    out, search = console.stdout_console(), found.search
    if search.runner_up is not None:
        loser = search.runner_up
        out.print(f"second: {loser.candidate.layout} with {loser.goodput:.3g} requests/s; {found.reason}")
    names = ("third", "fourth")
    for name, each in zip(names, search.others, strict=False):
        out.print(f"{name}: {each.candidate.layout} with {each.goodput:.3g} requests/s")
    if search.replicas is not None:
        num = winner_devices(found)
        out.print(f"plain: {num} x 1epd with {num * search.replicas.goodput:.3g} requests/s")
    if search.encoder_scaling:
        steps = ", ".join(f"{count}: {value:.3g}" for count, value in search.encoder_scaling)
        out.print(f"requests/s by number of encoders, all else equal: {steps}")


def winner_devices(found: Plan) -> int:
    """Returns the devices of the winner's cell, which runners-up have too."""
    return found.winner.candidate.num_devices


def print_answer(answer: Answer) -> None:
    """Prints the question, the fleets in their order, and the plan of the best."""
    out = console.stdout_console()
    out.print(f"{answer.model}: {answer.question}")
    for line in answer.demands:
        out.print(f"  {line}")
    table = Table("fleet", "layout", box=None, pad_edge=False)
    for name in ("requests/min", "asked", "price/h", "per thousand", "kW"):
        table.add_column(name, justify="right")
    for offer in answer.offers:
        table.add_row(*_row(offer, answer))
    out.print(table)
    for offer in answer.offers:
        if offer.reason:
            out.print(f"{offer.name}: {offer.reason}")
    out.print(answer.conclusion)
    for line in answer.what_if_lines:
        out.print(f"  {line}")
    for plan in answer.best.plans:
        print_plan(plan)


def _row(offer: Offer, answer: Answer) -> tuple[str, ...]:
    if not offer.plans:
        return offer.name, "none", "", "no", "", "", ""
    asked = "" if answer.rate_per_s is None else "yes" if offer.serves(answer.rate_per_s) else "no"
    power = "" if offer.power_kw is None else f"{offer.power_kw:.3g}"
    cost = shown_price(offer.cost_per_thousand, offer.currency)
    price = shown_price(offer.price_per_hour, offer.currency)
    return offer.name, offer.layout, f"{60 * offer.goodput:.3g}", asked, price, cost, power

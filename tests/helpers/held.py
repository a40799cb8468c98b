"""What the calls of each step hold when backward begins, beside what is planned for them; the peak that is planned."""

from __future__ import annotations

from ds_adacc.observe.observer import Observer
from ds_adacc.plan.peak_estimate import estimated_held, estimated_peak


def watch_held(controller):
    """A list that gets, at the end of each step, the bytes planned for the calls of that step and those they held."""
    pairs, end_step = [], controller.end_step

    def count():
        if controller.step.observer is None:
            controller.step.observer = Observer()

    def ending():
        observer = controller.step.observer
        pairs.append((estimated_held(controller.agreement, observer.held_calls), observer.held_bytes))
        end_step()
        count()

    controller.end_step = ending
    count()
    return pairs


def planned_peak(agreement, plans):
    """The estimated peak bytes of as many calls as these plans of block types are for."""
    return estimated_peak(agreement, plans, {each.spec.name: each.spec.count for each in plans})

"""Which live sets wait for a plan, beyond those that have just run."""

from two_programs import TwoPrograms

from ds_adacc.execute.input_placement import InputPlacement


def test_what_an_earlier_plan_is_for_is_planned_again_where_inputs_are_held_in_another_way():
    """The last plan is for the decoder alone, and the encoder has not run since."""
    training = TwoPrograms(enabled=False)
    training.step((16, None))
    training.step((None, 16))
    controller, planned = training.runtime.controller, set(training.runtime.agreement.agreed_types)
    assert len(controller.plan.policies) == 1 and len(planned) == 2
    controller.hold_inputs(InputPlacement(on_host=True))
    training.step((None, 16))
    assert controller.plan.policies.keys() == planned

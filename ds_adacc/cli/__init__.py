"""The command `ds_adacc`: `plan` before a training, `report` on a run, `doctor` for an installation.

In: arguments, and the files that they name. Out: tables or one JSON document, figures, and an exit code.

* main.py: finds the subcommand, shows its answer, sets the exit code
* answer.py: what a subcommand gives back
* plan.py: `ds_adacc plan`; factory.py records the user's model, batch_size.py estimates the largest micro-batch,
  plan_computation.py finds the plan, plan_view.py shows it, plots/ draws it
* report.py: `ds_adacc report`; events.py checks the journal
* doctor.py: `ds_adacc doctor`; checks.py looks at what is installed, script.py at a ds_config and a training script
"""

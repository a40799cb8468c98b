"""What a run says: its plan as a table in the log, its events in a journal.

In: the plan, what was recorded of the blocks, and what was observed of a step. Out: text, and lines of JSON.

* decision.py: what a policy does with each value, in words; what a plan decides for a block type, as plain data
* screen.py: the part of a plan's tables that fits on a screen
* tables.py: the tables of a plan, of at most 80 columns; grid.py: rows and columns, by Rich
* plan_text.py: the plan for the log and for the journal
* plan_log.py: which plans the log shows, as a table or as a line
* journal.py: the run's journal, a line of JSON for each event
"""

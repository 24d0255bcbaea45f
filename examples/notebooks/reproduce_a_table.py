# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Reproduce a table
#
# A sweep is a TOML file: models × tasks × methods × seeds. This one is as small as a table can be;
# the files in `configs/` are behind the figures of `docs/results.md` and `docs/untuned.md`.
# Run it: `python examples/notebooks/reproduce_a_table.py`. In the shell: `misvo bench FILE`, `misvo report FOLDER`.

# %%
import tempfile
from pathlib import Path

from misvo.bench import config, report, sweep

CONFIG = """
seeds = [42]
encoder = "none"

[settings]
rollouts = 4
steps = 2
max_new_tokens = 12

[[models]]
path = "smollm2-135m"

[[tasks]]
name = "prompts"
prompts = 2
reward = "words:5-9"

[[methods]]
method = "best-of-n"

[[methods]]
method = "misvo"
"""

# %% [markdown]
# The sweep writes a line as each prompt is done. Killed, it goes on where it was.

# %%
folder = Path(tempfile.mkdtemp())
(folder / "small.toml").write_text(CONFIG)
done = sweep.run(config.read(folder / "small.toml"), folder / "run")
print(done)

# %% [markdown]
# The report has tables (Markdown, LaTeX), figures and a page.

# %%
made = report.make([folder / "run"], folder / "report")
print(made.files)
print(made.markdown)

"""misvo inside other programs: `lm_eval` (a model of lm-evaluation-harness) and `transformers` (`custom_generate`).

Each module needs its package and is imported by those who want it; nothing else of misvo imports them.
"""

"""Error feedback: the rounding errors of a step that counts are added to the values of the next one.

``step`` says which buckets or calls are one step, and how it ended; ``store`` keeps residuals by parameter;
``checkpoint`` saves and loads them.
"""

"""MegaTrain and its rivals on the same work, one after the other, each in a process of its own.

    python -m benchmarks.rivals --shape 3b --sequences 96 --output benchmarks/results

Each row is a JSON file; rows that fail are kept with the reason. What is equal for all: the model
(random weights), the random tokens, bf16 computation, fp32 masters and moments, AdamW's settings,
clipping at 1.0. With `--lora-r 16` LoRA is trained alone, and the rivals are PEFT's own ways on a
model that rests on the device. What is each one's own: micro-batch and settings, tuned and written
into its row. The code that goes with the MegaTrain paper is in no package index, so it has no row.
"""

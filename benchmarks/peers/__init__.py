"""The engine beside its peers, on the CPU: `scripts/bench peers [--only MODEL[/PRECISION]] [--quick]`.

**Rows.** A peer is another implementation at some precision (`rows.py`). Each row is a process of its own, in
the peer's own environment (`benchmarks/peers/install`); a peer that is not installed is a row that says so.
Whatever a row needs (a GGUF file, an OpenVINO model) is made here, once, from the same checkpoint.

**Turns.** All rows of one model and precision are loaded and warmed up. Then comes round 1 of every row,
round 2 of every row, and so on, odd rounds backwards. Whoever does not measure is stopped (SIGSTOP): no
thread pool spins beside the one that does, and every row keeps its own way to wait. Figures are medians of
the rounds, with their range; ratios are taken within one file of results only.

**What is measured**, with the same random token ids for all:

    prefill_512   one call that answers the first new token of a prompt of 512: prompt tokens per second
    decode_1      a greedy call for a prompt of 128 tokens: the tokens after the first new one, over the time
                  from the first to the last, per second; nobody stops at an end-of-text token
    decode_8      eight such prompts at once: tokens per second of all together
    encode        a forward of 32 x 128 tokens (sequences per second) and of 1 x 16 (milliseconds)
    first_token   seconds from the call of decode_1 to its first token
    peak_bytes    resident memory of the process at its highest, loading and libraries included
    same_tokens   tokens of decode_1 before the first that differs from transformers eager's in this file

**Shares.** Each round also asks what the machine can do at best (`roof.cpp`). A decode's share is bytes of
the weights that a step reads, as the row stores them, and of the cache (two per value, four in float32), over
the time of the step and the memory's read rate. A prefill's is floating point operations over its time
and the rate of the units on registers: float32's for float32 rows, int8's where activations are quantized,
else bfloat16's. Without a C++ compiler there are no shares.
"""

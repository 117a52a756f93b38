"""The engine and other engines on the CPU: `scripts/bench peers [--only MODEL[/PRECISION]] [--quick]`.

**Rows.** A peer is another implementation at some precision (`rows.py`). Each row runs in a process of its
own, in the peer's own environment (`benchmarks/peers/install`); for a peer that is not installed, the row
says so. Whatever a row needs (a GGUF file, an OpenVINO model) is made here, once, from the same checkpoint.

**Rounds.** All rows of one model and precision are loaded and warmed up. Round 1 then measures every row,
round 2 measures every row, and so on, with the order reversed in odd rounds. Processes that are not being
measured are stopped (SIGSTOP), so their thread pools do not spin during the measurement, and each keeps its
own waiting strategy. Figures are medians over the rounds, with their range; ratios are only taken within one
results file.

**Measurements**, with the same random token ids for all rows:

    prefill_512   one call that returns the first new token for a prompt of 512: prompt tokens per second
    decode_1      a greedy call for a prompt of 128 tokens: tokens per second after the first new token, over
                  the time from the first to the last; no row stops at an end-of-text token
    decode_8      eight such prompts as one batch: tokens per second of all together
    encode        a forward of 32 x 128 tokens (sequences per second) and of 1 x 16 (milliseconds)
    first_token   seconds from the call of decode_1 to its first token
    peak_bytes    peak resident memory of the process, including loading and libraries
    same_tokens   tokens of decode_1 before the first that differs from transformers eager's in this file

**Shares.** Each round also measures the machine's limits (`roof.cpp`). The share of a decode is the bytes
that a step reads, of weights as the row stores them and of the cache (two bytes per value, four in float32),
divided by the time of the step and the memory's read rate. The share of a prefill is its floating point
operations divided by its time and the peak rate of the arithmetic units on registers: float32 for float32
rows, int8 where activations are quantized, otherwise bfloat16. Without a C++ compiler there are no shares.
"""

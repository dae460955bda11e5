#!/usr/bin/env python3
"""Writes a small llama model with random weights: real shapes, meaningless text, the same bytes for the same seed.

usage: mkgguf.py OUT [--seed N]

Four layers, 128 wide, four heads over two key-value heads, weights in Q8_0, and a tokenizer of single
characters with byte fallback. Needs Python's standard library only. The file is GGUF version 3.
"""

import argparse
import random
import struct

WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, CONTEXT = 128, 4, 4, 2, 384, 2048
HEAD_WIDTH = WIDTH // HEADS
ALIGNMENT = 32

# GGUF value types and ggml tensor types
U32, I32, F32, STRING, ARRAY = 4, 5, 6, 8, 9
TENSOR_F32, TENSOR_Q8_0, FILE_TYPE_Q8_0 = 0, 8, 7
BLOCK = 32

# kinds of token pieces
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def string(text):
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind, value):
    if kind == STRING:
        return string(value)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f"}[kind], value)


def entry(key, kind, value):
    return string(key) + struct.pack("<I", kind) + scalar(kind, value)


def array(key, kind, values):
    head = string(key) + struct.pack("<IIQ", ARRAY, kind, len(values))
    return head + b"".join(scalar(kind, value) for value in values)


def pieces():
    """The vocabulary: (text, score, kind) of each token."""
    yield "<unk>", 0.0, UNKNOWN
    yield "<s>", 0.0, CONTROL
    yield "</s>", 0.0, CONTROL
    for byte in range(256):
        yield f"<0x{byte:02X}>", 0.0, BYTE
    yield "\u2581", -1.0, NORMAL  # stands for a space
    for code in range(ord("!"), ord("~") + 1):
        yield chr(code), -1.0, NORMAL


def metadata(vocabulary):
    texts, scores, kinds = zip(*vocabulary)
    return [
        entry("general.architecture", STRING, "llama"),
        entry("general.name", STRING, "random-tiny"),
        entry("general.file_type", U32, FILE_TYPE_Q8_0),
        entry("llama.context_length", U32, CONTEXT),
        entry("llama.embedding_length", U32, WIDTH),
        entry("llama.block_count", U32, LAYERS),
        entry("llama.feed_forward_length", U32, HIDDEN),
        entry("llama.attention.head_count", U32, HEADS),
        entry("llama.attention.head_count_kv", U32, KV_HEADS),
        entry("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        entry("llama.rope.dimension_count", U32, HEAD_WIDTH),
        entry("llama.rope.freq_base", F32, 10000.0),
        entry("llama.vocab_size", U32, len(texts)),
        entry("tokenizer.ggml.model", STRING, "llama"),
        entry("tokenizer.ggml.pre", STRING, "default"),
        array("tokenizer.ggml.tokens", STRING, texts),
        array("tokenizer.ggml.scores", F32, scores),
        array("tokenizer.ggml.token_type", I32, kinds),
        entry("tokenizer.ggml.unknown_token_id", U32, 0),
        entry("tokenizer.ggml.bos_token_id", U32, 1),
        entry("tokenizer.ggml.eos_token_id", U32, 2),
    ]


def matrix(source, columns, rows):
    """Q8_0: blocks of one half-precision scale and 32 signed bytes; the values' spread is 1 / sqrt(columns)."""
    spread = columns**-0.5
    # A uniform byte spreads over 256 / sqrt(12).
    scale = struct.pack("<e", spread / (256 / 12**0.5))
    data = b"".join(scale + source.randbytes(BLOCK) for _ in range(rows * columns // BLOCK))
    return [columns, rows], TENSOR_Q8_0, data


def ones(length):
    return [length], TENSOR_F32, struct.pack("<f", 1.0) * length


def tensors(source, vocabulary_size):
    yield "token_embd.weight", matrix(source, WIDTH, vocabulary_size)
    yield "output_norm.weight", ones(WIDTH)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        yield prefix + "attn_norm.weight", ones(WIDTH)
        yield prefix + "attn_q.weight", matrix(source, WIDTH, WIDTH)
        yield prefix + "attn_k.weight", matrix(source, WIDTH, HEAD_WIDTH * KV_HEADS)
        yield prefix + "attn_v.weight", matrix(source, WIDTH, HEAD_WIDTH * KV_HEADS)
        yield prefix + "attn_output.weight", matrix(source, WIDTH, WIDTH)
        yield prefix + "ffn_norm.weight", ones(WIDTH)
        yield prefix + "ffn_gate.weight", matrix(source, WIDTH, HIDDEN)
        yield prefix + "ffn_up.weight", matrix(source, WIDTH, HIDDEN)
        yield prefix + "ffn_down.weight", matrix(source, HIDDEN, WIDTH)


def padded(data):
    return data + bytes(-len(data) % ALIGNMENT)


def model(seed):
    vocabulary = list(pieces())
    keys = metadata(vocabulary)
    infos, bodies, offset = [], [], 0
    for name, (shape, kind, data) in tensors(random.Random(seed), len(vocabulary)):
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos.append(string(name) + dimensions + struct.pack("<IQ", kind, offset))
        bodies.append(padded(data))
        offset += len(bodies[-1])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys))
    return padded(head + b"".join(keys) + b"".join(infos)) + b"".join(bodies)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--seed", type=int, default=9)
    arguments = parser.parse_args()
    with open(arguments.out, "wb") as file:
        file.write(model(arguments.seed))


if __name__ == "__main__":
    main()

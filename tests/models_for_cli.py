"""Model functions as users write them, good and bad."""

import os
import time

import torch

from moe_compile.compatibility.small_block import SmallExperts, inputs


def tiny():
    return SmallExperts(), inputs(0)


def with_keywords():
    hidden, ids, weights = inputs(0)
    return SmallExperts(), (hidden,), {"top_k_index": ids, "top_k_weights": weights}


def no_experts():
    return torch.nn.Linear(8, 8), (torch.randn(4, 8),)


def raises():
    raise KeyError("no checkpoint here")


def wrong():
    return "a model"


def not_callable():
    return "a model", ()


def strange_arguments():
    return SmallExperts(), 3


def broken():
    return SmallExperts(), inputs(0)[:2]


def dies():
    os._exit(3)


def slow():
    time.sleep(600)

"""Small models of the kinds whose parameters have to be sorted."""

from collections.abc import Callable

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions with norms around a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.scale = nn.GroupNorm(2, channels)


class ConvNet(nn.Module):
    """A small residual network for images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.projection = nn.Linear(16, 64)
        self.fc = nn.Linear(64, 40)


class Experts(nn.Module):
    """The weights of E experts in one tensor each."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, hidden, width))
        self.down = nn.Parameter(torch.randn(num_experts, width, hidden))
        self.up_bias = nn.Parameter(torch.zeros(num_experts, hidden))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = Experts(4, width, 2 * width)
        self.shared = nn.Linear(width, width, bias=False)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.position = nn.Parameter(torch.randn(16, 32))
        self.layers = nn.ModuleList(Layer(32) for _ in range(3))
        self.unembedding_matrix = nn.Linear(32, 100, bias=False)


class LowRank(nn.Module):
    """A frozen linear layer with a trainable low-rank term."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, width, bias=False)})


def llama(*, tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))


def transformer() -> nn.Module:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, nn.LayerNorm(32))
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), 2)
    return nn.ModuleDict({"encoder": encoder, "decoder": decoder})


MODELS: tuple[Callable[[], nn.Module], ...] = (transformer, ConvNet, MixtureOfExperts, llama, gpt2)

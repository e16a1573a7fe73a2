"""The recipe's data: what is in the corpus, who reads which part of it, and going on in the middle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from recipes.gpt_moe_lightning import data
from recipes.gpt_moe_lightning.data import (
    Corpus,
    DataConfig,
    ShardedShuffle,
    TextData,
    Windows,
    docstrings,
    held_out,
    pydoc_topics,
    stdlib_corpus,
    text_corpus,
    tokenize,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def corpus(cache):
    return stdlib_corpus(cache)


def test_corpus_is_megabytes_of_english_with_held_out_files(corpus):
    assert 1_000_000 < len(corpus.train) < 5_000_000
    assert 0.01 < len(corpus.validation) / len(corpus.train) < 0.15
    assert corpus.train.count(" the ") > 10_000
    train, validation = (set(t.split(data.SEPARATOR)) - {""} for t in (corpus.train, corpus.validation))
    assert not train & validation
    assert len(validation) > 10


def test_corpus_is_the_same_again_and_from_the_cache(corpus, cache):
    assert stdlib_corpus(None) == corpus
    assert stdlib_corpus(cache) == corpus


def test_a_damaged_cache_is_not_believed(tmp_path, monkeypatch):
    documents = list(itertools.islice(data.stdlib_documents(), 100))
    read = []
    monkeypatch.setattr(data, "stdlib_documents", lambda: read.append(1) or documents)
    corpus = stdlib_corpus(tmp_path)
    assert stdlib_corpus(tmp_path) == corpus
    assert len(read) == 1, "the second time from the cache"
    (file,) = tmp_path.iterdir()
    text = file.read_bytes()
    assert len(text) > 10_000
    file.write_bytes(text[:5000] + b"#" + text[5001:])
    assert stdlib_corpus(tmp_path) == corpus
    file.write_bytes(text[:300])
    assert stdlib_corpus(tmp_path) == corpus
    assert len(read) == 3
    assert [f.name for f in tmp_path.iterdir()] == [file.name]


def test_a_corpus_that_cannot_be_cached_is_used_all_the_same(tmp_path, monkeypatch, capsys):
    """As where the home directory of a container or a compute node is missing, read-only or full."""
    monkeypatch.setattr(data, "stdlib_documents", lambda: [("a.py", "some text"), ("b.py", "other text")])
    (tmp_path / "file").write_text("")
    found = stdlib_corpus(tmp_path / "file" / "cache")
    assert found == stdlib_corpus(None)
    assert "cannot be written, so the corpus is not cached: Not a directory" in capsys.readouterr().err

    monkeypatch.setattr(data.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert stdlib_corpus(tmp_path / "full") == found
    assert "No space left on device" in capsys.readouterr().err
    assert list((tmp_path / "full").iterdir()) == []


def test_docstrings_and_topics_are_parsed_not_run():
    source = '"""M."""\nraise SystemExit\nclass A:\n  """C."""\n  def f(self):\n    """F."""\n    x = """no"""\n'
    assert sorted(docstrings(source)) == ["C.", "F.", "M."]
    assert list(pydoc_topics("topics = {'a': 'x', 'b': 'y'}\n")) == [("#a", "x"), ("#b", "y")]


def test_held_out_is_a_fixed_choice_by_name():
    names = [f"module{i}.py" for i in range(2000)]
    share = sum(map(held_out, names)) / 2000
    assert 0.03 < share < 0.07
    assert [held_out(n) for n in names] == [held_out(n) for n in names]


def test_bytes_are_tokens():
    assert tokenize("aé").tolist() == [97, 195, 169]


def test_windows_overlap_by_the_one_token_that_is_predicted():
    windows = Windows(np.arange(10, dtype=np.uint16), 3)
    assert [w.tolist() for w in windows] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    with pytest.raises(ValueError, match="shorter than one window"):
        Windows(np.arange(3, dtype=np.uint16), 3)


@pytest.mark.parametrize(("size", "ranks"), [(10, 1), (10, 2), (11, 3), (7, 8)])
def test_ranks_share_a_shuffle_without_overlap(size, ranks):
    shares = [list(ShardedShuffle(size, rank=r, world_size=ranks, seed=5)) for r in range(ranks)]
    assert {len(s) for s in shares} == {size // ranks}
    flat = [i for s in shares for i in s]
    assert len(set(flat)) == len(flat)
    assert set(flat) <= set(range(size))


def test_epochs_and_seeds_differ_and_repeat():
    def order(seed, epoch):
        sampler = ShardedShuffle(50, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1) != order(2, 1)
    assert sorted(order(1, 1)) == list(range(50))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_in_the_middle_of_an_epoch(monkeypatch, workers):
    monkeypatch.setattr(data, "stdlib_corpus", lambda cache: Corpus("abcdefghij" * 40, "klm" * 30, "test"))

    def loader():
        module = TextData(DataConfig(batch_size=4, num_workers=workers), context=8, seed=3)
        module.setup()
        made = module.train_dataloader()
        made.sampler.set_epoch(2)
        return made

    whole = list(loader())
    first = loader()
    it = iter(first)
    for _ in range(5):
        next(it)
    state = first.state_dict()
    del it
    again = loader()
    again.load_state_dict(state)
    rest = list(again)
    assert len(whole) > 8
    assert len(rest) == len(whole) - 5
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[5:], strict=True))


def test_local_text_with_and_without_a_validation_file(tmp_path):
    (tmp_path / "wiki.train.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    corpus = text_corpus(tmp_path)
    assert corpus.validation.splitlines() == [f"line {i}" for i in range(0, 100, 20)]
    assert "line 20\n" not in corpus.train
    (tmp_path / "wiki.valid.txt").write_text("held out")
    (tmp_path / "wiki.test.txt").write_text("never read")
    corpus = text_corpus(tmp_path)
    assert corpus.validation == "held out"
    assert "never" not in corpus.train
    assert "line 20\n" in corpus.train


def test_nothing_is_downloaded_unless_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "download_wikitext", lambda: pytest.fail("downloaded"))
    with pytest.raises(ValueError, match=r"data\.path=.*data\.download=true"):
        DataConfig(name="wikitext").corpus()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        DataConfig(name="wikitext", path=str(tmp_path / "nowhere")).corpus()

import re
from importlib.resources import files

import duckdb
import pyarrow as pa
import pytest

from replay.errors import UnknownQuery
from replay.queries import numbered, query, spelled


def test_parameters_are_spelled_for_the_database() -> None:
    assert "$max_depth" in query("chain")
    assert ":max_depth" in query("chain", "sqlalchemy")
    assert "$max_depth" not in query("chain", "sqlalchemy")


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(UnknownQuery, match=r"no query is named 'chian': use one of .*\bchain\b"):
        query("chian")


def test_every_query_has_a_name_and_a_sentence() -> None:
    for file in files("replay").joinpath("sql").iterdir():
        text = file.read_text()
        assert len(re.findall(r"^-- name: \w+\n-- [A-Z]", text, re.MULTILINE)) == text.count("-- name:") > 0, file.name


def test_an_array_is_opened_in_the_words_of_the_database() -> None:
    assert "select value from json_each(:only)" in query("calls_of", "sqlite")
    asked = query("calls_of", "postgresql")
    assert "rollout_id = any(array(select value from json_array_elements_text(cast(:only as json)) " in asked


def test_parameters_are_numbered_where_they_first_appear() -> None:
    asked = numbered("select :low, x::text, :high, :low")
    assert (asked.text, asked.names) == ("select $1, x::text, $2, $1", ("low", "high"))


def test_values_are_spelled_so_that_none_ends_early() -> None:
    text = spelled("select :name, x::text, :high", {"name": "a\\' or ':high", "high": 2**40})
    assert text == "select E'a\\\\'' or '':high', x::text, 1099511627776"


def test_the_chain_query_places_by_position_even_when_duckdb_may_shuffle() -> None:
    size, each = 3000, 3
    ids = [n.to_bytes(16, "big") for n in range(size)]
    model_call = pa.table(
        {
            "call": pa.array(range(size), pa.int32()),
            "rollout": pa.array([0] * size, pa.int32()),
            "call_id": pa.array(ids, pa.binary(16)),
            "parent_id": pa.array([ids[n - 1] if n % each else None for n in range(size)], pa.binary(16)),
        }
    )
    with duckdb.connect(":memory:", config={"preserve_insertion_order": False, "threads": 2}) as engine:
        engine.register("model_call", model_call)
        engine.register("selected", model_call.select(["call"]))
        lines = engine.sql(query("chain"), params={"max_depth": each}).fetchall()
    assert sorted(lines) == [
        (tip, at, tip - each + 1 + at) for tip in range(each - 1, size, each) for at in range(each)
    ]

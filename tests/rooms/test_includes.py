"""Tests which includes cmake/Includes.cmake refuses, on trees of a few files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The environment's own cmake comes before any other in PATH, which may be too old.
CMAKE = shutil.which(
    "cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)

# There are two rooms above two rooms on the ground, of which `round` depends only on `base`.
ROOMS = """
thalweg_declare_room(NAME base LAYER 0 FOLDERS core/base)
thalweg_declare_room(NAME wire LAYER 0 FOLDERS core/wire)
thalweg_declare_room(NAME round LAYER 1 FOLDERS server/round DEPS base)
thalweg_declare_room(NAME job LAYER 2 FOLDERS server/job DEPS round)
thalweg_leave_out(server/page)
"""
FILES = {
    "core/base/clock.h": "#include <string>\n",
    "core/wire/frame.h": "",
    "server/round/round.h": '#include "core/base/clock.h"\n#include "absl/status/status.h"\n',
    "server/round/round.cc": '#include "server/round/round.h"\n',
    "server/job/job.h": '#include "server/round/round.h"\n#include "core/base/clock.h"\n',
    "server/job/parts/part.cc": '#include "server/job/job.h"\n',
    "server/page/page.h": '#include "server/job/job.h"\n',
}


def check(
    folder: Path, files: dict[str, str | None], rooms: str = ROOMS
) -> subprocess.CompletedProcess:
    """Runs the check on a project of FILES and `files`; None leaves one out."""
    for name, text in {**FILES, **files}.items():
        if text is None:
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = folder / "check.cmake"
    script.write_text(
        f'cmake_minimum_required(VERSION 3.28)\nset(PROJECT_SOURCE_DIR "{folder}")\n'
        f'include("{ROOT}/cmake/Rooms.cmake")\n'
        f"{rooms}\nthalweg_check_rooms()\n"
    )
    assert CMAKE is not None
    return subprocess.run(
        [CMAKE, "-P", script], capture_output=True, text=True, timeout=60, cwd=folder
    )


def complaints(done: subprocess.CompletedProcess) -> str:
    """Returns the message of a failed check on one line."""
    assert done.returncode != 0
    return " ".join(done.stderr.split())


def test_includes_of_rooms_below_pass(tmp_path):
    done = check(tmp_path, {})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", ['#include "{}"', "#include <{}>", '  #  include "{}"  // why'])
def test_upward_include_is_refused_with_file_line_and_rooms(tmp_path, form):
    text = f"#pragma once\n\n{form.format('server/job/job.h')}\n"
    said = complaints(check(tmp_path, {"core/base/hidden.h": text}))
    assert (
        "core/base/hidden.h:3 includes server/job/job.h of room 'job' (layer 2), which room 'base' "
        "(layer 0) must not know: includes point down" in said
    )


def test_include_of_a_room_on_the_same_layer_is_refused(tmp_path):
    said = complaints(check(tmp_path, {"core/base/a.cc": '#include "core/wire/frame.h"\n'}))
    assert "core/base/a.cc:1 includes core/wire/frame.h of room 'wire' (layer 0)" in said


def test_include_of_a_lower_room_outside_the_dependencies_is_refused(tmp_path):
    said = complaints(check(tmp_path, {"server/job/a.cu": '#include "core/wire/frame.h"\n'}))
    assert "of room 'wire' which room 'job' does not depend on" in said


def test_all_wrong_includes_are_named(tmp_path):
    said = complaints(
        check(
            tmp_path,
            {
                "core/base/a.cc": '#include "server/round/round.h"\n',
                "core/wire/b.cc": '#include "server/round/round.h"\n',
            },
        )
    )
    assert "core/base/a.cc:1" in said
    assert "core/wire/b.cc:1" in said


def test_file_in_no_room_is_refused(tmp_path):
    said = complaints(check(tmp_path, {"core/stray/stray.h": ""}))
    assert "core/stray/stray.h lies in no room" in said


def test_include_of_what_the_configuration_leaves_out_is_refused(tmp_path):
    said = complaints(check(tmp_path, {"server/job/a.cc": '#include "server/page/page.h"\n'}))
    assert "server/page/page.h which lies in no room of this configuration" in said


def test_include_by_a_relative_path_is_refused(tmp_path):
    said = complaints(check(tmp_path, {"server/round/a.cc": '#include "../job/job.h"\n'}))
    assert "../job/job.h which must be named by its path in the project" in said


def test_folder_with_two_rooms_is_refused(tmp_path):
    twice = ROOMS + "thalweg_declare_room(NAME other LAYER 0 FOLDERS core/base)\n"
    said = complaints(check(tmp_path, {}, twice))
    assert "folder core/base belongs to room 'base' and cannot belong to 'other'" in said


def test_test_includes_what_it_links_and_no_more(tmp_path):
    rooms = ROOMS + (
        "thalweg_declare_test(fakes round core/base/fakes.cc)\n"
        'thalweg_declare_test(base_test "base;thalweg_fakes" core/base/a_test.cc)\n'
    )
    files = {
        "core/base/fakes.cc": '#include "server/round/round.h"\n',
        "core/base/a_test.cc": '#include "server/round/round.h"\n',
        "core/base/not_built_test.cc": '#include "server/job/job.h"\n',
    }
    done = check(tmp_path, files, rooms)
    assert done.returncode == 0, done.stderr
    files["core/base/a_test.cc"] = '#include "server/job/job.h"\n'
    said = complaints(check(tmp_path, files, rooms))
    assert "core/base/a_test.cc:1 includes server/job/job.h of room 'job' which test" in said


FLOORS = 'thalweg_floors(server/job wire "node|shard" .)\n'
ON_FLOORS = {
    "server/job/parts/part.cc": None,
    "server/job/wire/frame.h": "",
    "server/job/node/node.h": '#include "server/job/wire/frame.h"\n',
    "server/job/shard/shard.h": '#include "server/job/testing/fake.h"\n',
    "server/job/testing/fake.h": '#include "server/job/node/node.h"\n',
    "server/job/both_test.cc": '#include "server/job/shard/shard.h"\n',
    "server/job/all.cc": '#include "server/job/node/node.h"\n',
}


def test_includes_of_floors_below_and_of_doubles_pass(tmp_path):
    done = check(tmp_path, ON_FLOORS, ROOMS + FLOORS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("file", "header"),
    [
        ("server/job/wire/frame.cc", "server/job/node/node.h"),
        ("server/job/node/node.cc", "server/job/shard/shard.h"),
        ("server/job/node/node_test.cc", "server/job/shard/shard.h"),
        ("server/job/node/node.cc", "server/job/job.h"),
    ],
)
def test_include_of_a_floor_above_or_beside_is_refused(tmp_path, file, header):
    said = complaints(
        check(tmp_path, {**ON_FLOORS, file: f'#include "{header}"\n'}, ROOMS + FLOORS)
    )
    assert "Includes against the floors of server/job" in said
    assert f'{file}: #include "{header}' in said


def test_folder_on_no_floor_is_refused(tmp_path):
    said = complaints(check(tmp_path, {**ON_FLOORS, "server/job/attic/box.h": ""}, ROOMS + FLOORS))
    assert "server/job has folders that are on no floor: attic" in said

"""Two short plays in the form of Project Gutenberg's Shakespeare, for the tests of data sets."""

from __future__ import annotations

from pathlib import Path

LONG = "abcdefghij klmnopqrst uvwxyz ABCDEFGHIJ KLMNOPQRST UVWXYZ, 0123456789; nothing will come"
"""A line of 88 characters."""
PLAY = f"""THE FIRST PLAY

by William Shakespeare


Dramatis Personae

  KING, a king

ACT I.
  KING. {LONG}
    {LONG}   of   nothing
                                                             Exit
  Fool. One line.
    Two lines!
  KING. {LONG}
  LEAR. {LONG}
    {LONG}
    {LONG}
    {LONG}
    {LONG}
    {LONG}
    {LONG}
    {LONG}
"""
FLAT = f"""THE COMEDY OF ERRORS

by William Shakespeare


ACT I. SCENE 1

DROMIO. {LONG}
  {LONG}
{LONG}
ACT II. SCENE 1
{LONG}
LUCE. {LONG}
<<THIS ELECTRONIC VERSION
{LONG}
"""
TEXT = f"""This is a file.
THE SONNETS

by William Shakespeare

  From fairest creatures we desire increase,

{PLAY}
{FLAT}
"""


def write_plays(folder: Path, text: str = TEXT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "t8.shakespeare.txt").write_text(text)
    return folder

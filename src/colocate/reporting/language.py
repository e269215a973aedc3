"""The language that a text seems to be in, for fonts, line breaks and screen readers."""

from __future__ import annotations

import re

_MOST_READ = 4000
"""Characters of a text that are looked at."""
_KANA = re.compile(r"[\u3041-\u309f\u30a0-\u30fa\u30fc-\u30ff\uff66-\uff9f]")
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_BOPOMOFO = re.compile(r"[\u3105-\u312f\u31a0-\u31bf]")
_TAG = re.compile(r"</?[a-z_]+>")
_LETTER = re.compile(r"[^\W\d_]")
_SCRIPTS_OF_ONE_LANGUAGE = {
    "ko": re.compile(r"[\uac00-\ud7a3\u1100-\u11ff\u3130-\u318f]"),
    "th": re.compile(r"[\u0e01-\u0e5b]"),
    "el": re.compile(r"[\u0370-\u03ff\u1f00-\u1fff]"),
    "he": re.compile(r"[\u05d0-\u05ea]"),
}
# Frequent characters of which each has another form in the other script, pair by pair.
_TRADITIONAL = frozenset(
    "這個們說學來時對會過還後開問見話點實現數題義讓長無從給與專業電腦體價錢買賣頭車馬東幾萬歲"
)
_SIMPLIFIED = frozenset(
    "这个们说学来时对会过还后开问见话点实现数题义让长无从给与专业电脑体价钱买卖头车马东几万岁"
)
_ENGLISH = re.compile(
    r"\b(the|and|of|is|are|what|that|this|with|for|you|have|from|which|how|not|it|my|me|then|there)\b",
    re.IGNORECASE,
)
_FEWEST_ENGLISH_WORDS = 2


def language_of(text: str) -> str:
    """The BCP 47 tag of the language that `text` seems to be in; empty where that is not clear.

    Chinese is told by its characters, Traditional from Simplified by frequent characters that only one of the
    two has, and is "zh" where no character decides; Japanese by its kana. Korean, Thai, Greek and Hebrew have
    scripts of their own. Of the languages in Latin script only English is recognised, by its small words.

    A text of several languages gets the one that most of its letters belong to; a character of Chinese or
    Japanese counts as three letters, as a word has about that many times as many letters as characters. Tags
    such as <answer> do not count.
    """
    text = _TAG.sub(" ", text[:_MOST_READ])
    num_letters = len(_LETTER.findall(text))
    kana, han, bopomofo = (len(kind.findall(text)) for kind in (_KANA, _HAN, _BOPOMOFO))
    num_characters = kana + han + bopomofo
    if 3 * num_characters > num_letters - num_characters:
        # Japanese prose has more kana than Han; a Chinese text may quote a word of it.
        return "ja" if 5 * kana > han else _chinese(text, bopomofo)
    for tag, letters in _SCRIPTS_OF_ONE_LANGUAGE.items():
        if 2 * len(letters.findall(text)) > num_letters:
            return tag
    return "en" if len(set(map(str.lower, _ENGLISH.findall(text)))) >= _FEWEST_ENGLISH_WORDS else ""


def lang_attribute(text: str) -> str:
    """` lang="..."` for an element of an English page; empty if its `text` is, or may be, English."""
    language = language_of(text)
    return f' lang="{language}"' if language not in ("", "en") else ""


def _chinese(text: str, num_bopomofo: int) -> str:
    traditional = sum(character in _TRADITIONAL - _SIMPLIFIED for character in text) + num_bopomofo
    simplified = sum(character in _SIMPLIFIED - _TRADITIONAL for character in text)
    if traditional == simplified:
        return "zh"
    return "zh-Hant" if traditional > simplified else "zh-Hans"

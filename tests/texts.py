"""Texts that tokenizers divide in different ways."""

from __future__ import annotations

import random

PIECES = [
    *(
        "def f(x):\n    return x+1\n",
        "for (int i=0;i<10;++i) { a[i] <<= 2; }",
        "SELECT * FROM t WHERE a>=10.5;",
        "https://a.b/c?d=1&e=%20",
    ),
    *("in 2024", "  7  8\t9", "3.14159", "1,234,567", "٣٤٥", "½ ² Ⅷ", "0x1F", "v1.2.3-rc4", "12345678901"),
    *(
        "😀",
        "👩‍👩‍👧‍👦 family",
        "🇩🇪🇫🇷",
        "❤️",
        "日本語のテキスト",
        "中文分词测试。",
        "한국어 문장",
        "العربية نص",
        "שלום עולם",
        "हिन्दी में",
        "ไทย",
    ),
    *(
        "naïve café",
        "Ünïcödé ÉTÉ",
        "ПРИВЕТ мир",
        "Ελληνικά",
        "ﬁne",
        "e\u0301",
        "\u200b",
        "\ufeff",
        "\u00a0",
        "\u3000",
        "a\u00adb",
    ),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t", " \n ", "\n   \n", "        "),
    *("I'm", "you'll", "WE'RE", "it's", "don't", "'tis", "he'd", "O'Neil", "they've,", "’s"),
    *(
        "...",
        "!!!",
        "?!",
        "--",
        "(a)",
        "[b]",
        "{c}",
        "<d>",
        '"e"',
        "`f`",
        "$100",
        "50%",
        "#tag",
        "@user",
        "a_b_c",
        "x==y",
        "&&",
        "||",
        "~",
        "^",
    ),
    *(
        "Hello",
        "world",
        "antidisestablishmentarianism",
        "camelCaseWords",
        "HTTPServer",
        "ALLCAPS",
        "a",
        "I",
        "supercalifragilistic" * 3,
    ),
]


def texts(count, seed=0, special=()):
    """So many texts of pieces, some of them with special tokens inside."""
    rng = random.Random(seed)
    made = list(PIECES)
    while len(made) < count:
        pieces = rng.choices(PIECES, k=rng.randint(1, 12))
        if special and rng.random() < 0.2:
            pieces.insert(rng.randrange(len(pieces) + 1), rng.choice(special))
        made.append(rng.choice(["", " "]).join(pieces))
    return made[:count]

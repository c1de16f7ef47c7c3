"""Texts that tokenizers and detokenisers get wrong, and strategies that make more of them."""

from __future__ import annotations

from hypothesis import strategies as st

STRESS = (
    "",
    " ",
    "a",
    "Hello world! Café déjà vu — 123 😊",
    "The quick brown fox jumps over the lazy dog.",
    "naïve façade Ångström Łódź żółć Đặng",
    "ПриветМир 你好，世界！这是一个测试。日本語のテキスト 한국어 텍스트",
    "שלום עולם مرحبا بالعالم \u202bרתל\u202c",
    "👩‍👩‍👧‍👦 👍🏽 🇺🇸🇩🇪 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "e\u0301 a\u0308\u0323 n\u0303 \u0301alone Z̷͓̈a̴͇͝l̸̰̈g̶̹̽o̷̖̓",
    "0 1 12 123 1234 1234567890 3.14159 1,000,000 0xFF 1e-9 ٣٤٥ Ⅻ ½ ²",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # comment\n",
    'if (a<b && b>c) { printf("%d\\n", a|b); } // <<EOF',
    "\t\tif x:\r\n\t\t\treturn\r\n\r\n",
    "line\nline\n\nline\n\n\nline\n\n\n\n\n",
    "  leading",
    "trailing  ",
    "a  b   c    d     e" + " " * 40 + "f",
    " " * 100,
    "\n" * 50,
    "\u00a0nbsp\u2003em\u200bzero\u3000wide\ufeffbom",
    "▁already ▁▁marked▁",
    "don't can't they'll I'VE we'd 's 'S ''",
    "https://example.org/a?b=c&d=%20e#f user@example.org",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n<eos>",
    "<unk> <pad> <unused7> <mask> [multimodal] <table><tr>",
    "<|im_start <|im_start|x> |im_end|> <0x0A> <0xE2>",
    "<think>\nhm\n</think>\n\nyes",
    "\x00\x01\x1b[0m\x7f",
    "ﷺ ﬁ ﬀ Ǆ ẞ İ ı ſ",
    "𝕳𝖊𝖑𝖑𝖔 𐍈 🂡 \U0010fffd",
    "a" * 300,
    "aA1!" * 60,
)

_PIECES = st.sampled_from(
    (
        " ",
        "  ",
        "\n",
        "\t",
        "\r\n",
        "a",
        "The",
        " cat",
        "1",
        "23",
        " 4",
        "'s",
        "é",
        "e\u0301",
        "½",
        "你好",
        "😊",
        "👩‍👧",
        "▁",
        "<",
        "|",
        ">",
        "<|im_end|>",
        "<end_of_turn>",
        "<eos>",
        "<unused1>",
        "<table>",
        "foo_bar(",
        "):\n    ",
        "\u200d",
        "\ufe0f",
        "ß",
    )
)

any_text = st.one_of(
    st.text(max_size=60), st.lists(_PIECES, max_size=14).map("".join), st.sampled_from(STRESS)
)
"""Any text without lone surrogates (which are no text), with many awkward ones."""

"""The plain text of HTML, DOCX and PDF files, and the encoding of text files."""

from __future__ import annotations

import codecs
import io
import re
import zipfile
import zlib
from html.parser import HTMLParser
from xml.etree import ElementTree

from unteach.errors import first_line

__all__ = ["FALLBACK", "RecordProblem", "byte_order_mark", "decode_text", "docx_text", "html_text", "pdf_text"]

FALLBACK = "windows-1252"
"""What a text without byte-order mark that is not UTF-8 is read as: Latin-1 with the signs that Windows adds to it."""
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before that of UTF-16, with which it begins
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_DECLARED = re.compile(rb"<meta[^>]+charset\s*=\s*[\"']?([\w-]+)", re.IGNORECASE)


class RecordProblem(ValueError):  # noqa: N818  (yielded in place of a record)
    """What keeps a record, or the rest of a file, from being read."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.place = place


def byte_order_mark(content: bytes) -> str | None:
    """The encoding that the first bytes of a file name, if they do."""
    return next((encoding for mark, encoding in _MARKS.items() if content.startswith(mark)), None)


def decode_text(content: bytes, declared: str | None = None) -> tuple[str, str]:
    """Text, by its byte-order mark, else as UTF-8, else as what it declares, else as ``FALLBACK``.

    Returns:
        The text, and a line for people where the encoding is an assumption, else nothing.
    """
    marked = byte_order_mark(content)
    if not marked and (position := content.find(b"\0")) >= 0:
        raise RecordProblem(f"not a text but a binary file (or UTF-16 without byte-order mark): NUL at byte {position}")
    try:
        return content.decode(marked or "utf-8"), ""
    except UnicodeDecodeError as error:
        if marked:
            raise RecordProblem(f"invalid {marked.removesuffix('-sig').upper()} at byte {error.start}") from None
        wrong = f"invalid UTF-8 at byte {error.start} (0x{content[error.start]:02x})"
    for encoding in filter(None, (declared, FALLBACK)):
        try:
            text = content.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
        return text, "" if encoding == declared else f"{wrong}, read as {FALLBACK} (Latin-1): save it as UTF-8 if wrong"
    raise RecordProblem(f"{wrong}, and not {FALLBACK} (Latin-1) either: save it as UTF-8")


class _Page(HTMLParser):
    """Collects what a page shows, a line for each block."""

    HIDDEN = frozenset({"title", "script", "style", "noscript", "template", "svg", "iframe", "object"})
    INLINE = re.compile(
        "a|abbr|b|bdi|bdo|cite|code|data|del|dfn|em|font|i|img|input|ins|kbd|label|mark|q|s|samp|small|span|strike|"
        "strong|sub|sup|time|tt|u|var|wbr"
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.hidden: list[str] = []
        self.preformatted = 0

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """To Python a section such as ``<![DATA[`` is an error; to a browser, and here, a comment."""
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:
            return self.parse_bogus_comment(i)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.HIDDEN:
            self.hidden.append(tag)
        elif not self.INLINE.fullmatch(tag):
            self.parts.append("\n")
        self.preformatted += tag == "pre"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.HIDDEN:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.hidden:
            del self.hidden[self.hidden.index(tag) :]
        elif not self.INLINE.fullmatch(tag):
            self.parts.append("\n")
        self.preformatted -= tag == "pre" and self.preformatted > 0

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def html_text(content: bytes) -> tuple[str, str]:
    """What a page shows, a line for each block, without title and scripts; and a line as of ``decode_text``."""
    declared = _DECLARED.search(content[:4096])
    text, note = decode_text(content, declared[1].decode() if declared else None)
    page = _Page()
    page.feed(text)
    page.close()
    lines = (re.sub(r" {2,}", " ", line).strip() for line in "".join(page.parts).splitlines())
    return "\n".join(line for line in lines if line), note


def docx_text(content: bytes) -> tuple[str, str]:
    """The paragraphs of a Word document, a line each, tables too, but no headers, footnotes and deleted text."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as parts:
            if parts.getinfo("word/document.xml").file_size > max(2**26, 200 * len(content)):
                raise RecordProblem("unpacks to much more than any document has")
            document = parts.read("word/document.xml")
        if b"<!DOCTYPE" in document:
            raise RecordProblem("its XML has a document type, which no Word document has")
        root = ElementTree.fromstring(document)
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        ElementTree.ParseError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise RecordProblem(f"not a readable .docx file: {first_line(error)}") from None
    found: list[str] = []

    def walk(element: ElementTree.Element) -> None:
        for child in element:
            tag = child.tag.rpartition("}")[2]
            if tag in ("Fallback", "moveFrom", "del", "pPr", "rPr"):  # said twice, taken away, or settings
                continue
            if tag == "t":
                found.append(child.text or "")
            elif tag in ("tab", "br", "cr"):
                found.append("\t" if tag == "tab" else "\n")
            walk(child)
            if tag == "p":
                found.append("\n")

    try:
        walk(root)
    except RecursionError:
        raise RecordProblem("not a readable .docx file: nested too deeply") from None
    return "".join(found).strip(), ""


def pdf_text(content: bytes) -> tuple[str, str]:
    """The text of a PDF file's pages, line by line as it is printed."""
    try:
        import pypdf
    except ImportError:
        raise RecordProblem("reading .pdf needs pypdf: pip install 'unteach[documents]'") from None
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        pages = [page.extract_text().strip() for page in reader.pages]
    except Exception as error:  # whatever a broken or encrypted file makes the library raise
        raise RecordProblem(f"not a readable .pdf file: {first_line(error)}") from None
    if not any(pages):
        raise RecordProblem(
            f"there is no text in its {len(pages)} pages, only pictures perhaps: run text recognition on it"
        )
    return "\n\n".join(filter(None, pages)), ""

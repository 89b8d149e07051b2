"""The page of `make shield` says what the scan found beside the truth, and what each model gives back."""

import json

from PIL import Image

from bench.shield_story import against_truth, page


def made(out):
    """A folder as the story leaves it: four records, two of them elements; the scan suspects three."""
    for folder in ("data", "scan", "audit", "audit-guarded"):
        (out / folder).mkdir()
    for file in ("data/target.png", "scan/composite-1.png", "audit/returned-1.png"):
        Image.new("RGB", (8, 8), "red").save(out / file)
    roles = ("element", "clean", "element", "clean")
    (out / "data/metadata.jsonl").write_text("".join(json.dumps({"role": role}) + "\n" for role in roles))
    (out / "data/targets.jsonl").write_text(json.dumps({"image": "target.png", "prompt": "a <cat>, a hat"}) + "\n")
    sets = [{"composite": "composite-1.png", "prompt": "a <cat>, a hat"}]
    scan = {"sets": sets, "suspects": [{"index": i} for i in (0, 1, 2)]}
    (out / "scan/scan.json").write_text(json.dumps(scan))
    for name, found in (("audit", True), ("audit-guarded", False)):
        result = {"prompt": "a <cat>, a hat", "found": found, "share": 1.0, "p": 0.001, "image": "returned-1.png"}
        (out / name / "audit.json").write_text(json.dumps({"results": [result]}))
    return scan


def test_the_page_compares_scan_and_models_with_the_truth(tmp_path):
    found = against_truth(tmp_path / "data", made(tmp_path))
    assert (found["precision"], found["recall"], found["suspects"]) == (2 / 3, 1, 3)
    html = page(tmp_path, tmp_path / "data", 3.0)
    assert "1 suspect sets found, 1 pictures are hidden" in html and "<cat>" not in html
    assert "1 of 1 come back" in html and html.count("given back unguarded") == 1 and "given back guarded" not in html

#!/usr/bin/env bash
# `make release VERSION=`: what must agree before a version is tagged, and the files that the workflow publishes.
set -euo pipefail
version=$1 bin=$2 built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
refuse() { echo "release: $1" >&2; exit 1; }
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || refuse "say which: make release VERSION=1.2.3"
[ -z "$(git status --porcelain)" ] || refuse "commit or stash what is changed"
! git rev-parse -q --verify "refs/tags/v$version" > /dev/null || refuse "v$version is tagged already"
grep -qx "__version__ = \"$version\"" fatbench/version.py || refuse "fatbench/version.py has another version"
grep -qx "version: $version" CITATION.cff || refuse "CITATION.cff has another version"
date=$(sed -nE "s/^## \[$version\] - ([0-9]{4}-[0-9]{2}-[0-9]{2})$/\1/p" CHANGELOG.md)
[ -n "$date" ] || refuse "CHANGELOG.md has no line '## [$version] - YYYY-MM-DD'"
grep -qx "date-released: $date" CITATION.cff || refuse "CITATION.cff has another date than CHANGELOG.md, $date"
build() { (cd "$1" && "$python" -m hatchling build -d "$2" "${@:3}" > /dev/null); }
python=$(realpath -s "$bin/python")
rm -rf dist
build . "$PWD/dist"
build . "$built/again" -t wheel
tar -xzf dist/*.tar.gz -C "$built"
build "$built/fatbench-$version" "$built/from-sdist" -t wheel
for wheel in "$built"/{again,from-sdist}/*.whl; do
    cmp "$wheel" dist/*.whl || refuse "the wheel is not the same when it is built again, or from the source archive"
done
"$bin/uv" tool run twine check --strict dist/*
OMP_NUM_THREADS=1 "$python" -m pytest -q -m '' tests/test_packaging.py tests/test_old_databases.py tests/test_old_files.py
git tag -a "v$version" -m "fatbench $version"
echo "release: dist/ is built and v$version tagged; git push origin v$version publishes it"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Publish a release: verify it, sign a tag for each of its wheels, and attach the wheel, the evidence and its signature.
#
#   ci/publish.sh COMMIT FOLDER      FOLDER has evidence.tar, SHA256SUMS and SHA256SUMS.sig
#
# By a maintainer, on a machine that is no agent, in a clone with an up-to-date main: git must be able to sign tags, and
# GitHub's gh be logged in. It builds nothing, moves no tag and replaces no file; started again it goes on.
set -euo pipefail
[ "$#" = 2 ] || {
  printf 'error: a commit and a folder are needed\n  to do: ci/publish.sh COMMIT FOLDER\n' >&2
  exit 2
}
commit="$(git rev-parse --quiet --verify "$1^{commit}")" || {
  printf 'error: git knows no commit %s\n  to do: git fetch origin\n' "$1" >&2
  exit 2
}
folder="$2"
for file in evidence.tar SHA256SUMS SHA256SUMS.sig; do
  [ -f "$folder/$file" ] || {
    printf 'error: there is no %s\n  where: %s\n  to do: fetch the artifacts of the release build\n' "$file" "$folder" >&2
    exit 2
  }
done
made="$(mktemp -d)"
trap 'rm -r "$made"' EXIT
tar -xf "$folder/evidence.tar" -C "$made" --wildcards '*.whl'
mapfile -t wheels < <(find "$made" -name '*.whl' | sort)
hilgate verify-bundle "$folder/evidence.tar" --profile release --commit "$commit" --root . \
  --signature "$folder/SHA256SUMS.sig" "${wheels[@]/#/--wheel=}"
for wheel in "${wheels[@]}"; do
  IFS=- read -r name version _ <<< "$(basename "$wheel")"
  tag="$name-$version"
  if git rev-parse --quiet --verify "refs/tags/$tag" > /dev/null; then
    [ "$(git rev-parse "$tag^{commit}")" = "$commit" ] || {
      printf 'error: the tag %s is of another commit\n  to do: raise the version; tags never move\n' "$tag" >&2
      exit 3
    }
  else
    git tag --sign --message "$tag" "$tag" "$commit"
  fi
  git push --quiet origin "refs/tags/$tag"
  gh release view "$tag" > /dev/null 2>&1 ||
    gh release create "$tag" --verify-tag --title "$tag" --notes "Changes: CHANGELOG.md in the wheel." \
      "$wheel" "$folder/evidence.tar" "$folder/SHA256SUMS" "$folder/SHA256SUMS.sig"
  echo "published $tag"
done

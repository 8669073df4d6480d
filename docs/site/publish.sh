#!/usr/bin/env bash
# Adds build/site to the branch gh-pages of `origin`, beside the versions that are there.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' epd/__init__.py)
pages=$(mktemp -d)
trap 'git worktree remove --force "$pages"' EXIT
if git fetch --quiet origin gh-pages; then
  git worktree add --quiet --force --detach "$pages" FETCH_HEAD
else
  git worktree add --quiet --force --detach "$pages"
  git -C "$pages" checkout --quiet --orphan first-pages
  git -C "$pages" rm --quiet -r --force .
fi
rm -rf "${pages:?}/$version"
cp -r "build/site/$version" "$pages/$version"
python3 docs/site/versions.py "$pages"
git -C "$pages" add --all --force .
if ! git -C "$pages" diff --cached --quiet; then
  git -C "$pages" commit --quiet --message "Add the documents of $version"
  git -C "$pages" push --quiet origin HEAD:refs/heads/gh-pages
fi

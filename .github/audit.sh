#!/bin/sh
# Known vulnerabilities among the locked packages. A version that is known to be bad must be found
# first: a service that answers nothing would otherwise pass for good news.
set -eu
audit="pip-audit --strict --no-deps --disable-pip --progress-spinner off"
canary=$(mktemp)
echo "jinja2==2.4.1" > "$canary"
if said=$($audit -r "$canary" 2>&1); then
    echo "the audit finds nothing wrong with jinja2 2.4.1: it is blind" >&2
    exit 1
fi
echo "$said" | grep -Eq "(PYSEC|GHSA|CVE)-" || { echo "the audit does not work: $said" >&2; exit 1; }
$audit -r requirements.lock
$audit -r cuda.lock
grep "^torch==" constraints.txt > "$canary"
$audit -r "$canary"

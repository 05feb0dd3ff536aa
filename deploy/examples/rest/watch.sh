#!/usr/bin/env bash
# The same with curl: models, forks, and the first lines of the event stream.
#
#     RFORK_PLANNER=http://127.0.0.1:8700 ./watch.sh
#
# RFORK_TOKEN is a reader token, if the planner requires tokens. SECONDS_OF_EVENTS defaults to 5.
set -euo pipefail
planner=${RFORK_PLANNER:-http://127.0.0.1:8700}
auth=(${RFORK_TOKEN:+-H "Authorization: Bearer $RFORK_TOKEN"})

# --fail-with-body: print the problem document and exit with an error.
get() { curl --silent --show-error --fail-with-body --max-time 10 "${auth[@]}" "$planner$1"; echo; }

get /v1/models
get '/v1/forks?limit=10'
get '/v1/instances?limit=10'
# 28: the time limit was reached, as intended.
curl --silent --no-buffer --max-time "${SECONDS_OF_EVENTS:-5}" "${auth[@]}" "$planner/v1/events" || test $? = 28

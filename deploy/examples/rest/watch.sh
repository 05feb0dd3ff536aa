#!/usr/bin/env bash
# The same with curl: models, forks, and the first lines of the stream of events.
#
#     RFORK_PLANNER=http://127.0.0.1:8700 ./watch.sh
#
# RFORK_TOKEN is a token of the role reader, where the planner asks for tokens. SECONDS_OF_EVENTS: 5.
set -euo pipefail
planner=${RFORK_PLANNER:-http://127.0.0.1:8700}
auth=(${RFORK_TOKEN:+-H "Authorization: Bearer $RFORK_TOKEN"})

# --fail-with-body: a problem document is shown, and the exit code is not 0.
get() { curl --silent --show-error --fail-with-body --max-time 10 "${auth[@]}" "$planner$1"; echo; }

get /v1/models
get '/v1/forks?limit=10'
get '/v1/instances?limit=10'
# 28: the time is over, which is how this ends.
curl --silent --no-buffer --max-time "${SECONDS_OF_EVENTS:-5}" "${auth[@]}" "$planner/v1/events" || test $? = 28

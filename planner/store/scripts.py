"""Lua scripts that Redis runs atomically.

Both receive the keys of `planner.store.redis_client.KEYS`, in that order.
"""

from __future__ import annotations

from typing import Final

OPEN: Final = """
-- Arguments: a new epoch, TTL of the keys in milliseconds. Returns {epoch, number of changes, shared time, floor}.
if redis.call('HEXISTS', KEYS[1], 'epoch') == 0 then
    redis.call('DEL', unpack(KEYS))
    redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'number', '0', 'at', redis.call('TIME')[1])
end
-- A write, so that a Redis that accepts none (full, or a read-only replica) is detected here.
redis.call('HSET', KEYS[1], 'opened', ARGV[1])
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[2]) end
return redis.call('HMGET', KEYS[1], 'epoch', 'number', 'at', 'floor')
"""

COMMIT: Final = """
-- Arguments: the replica's epoch, number of changes it has read and its time; maximum number of finished forks,
-- length of the stream and bytes of half of it, TTL of the keys in milliseconds; head part and all parts of an
-- instance, then of a fork; bodies.
-- Returns {changes it has not read, a verdict for each body, shared time}, or nil if it must load everything.
local meta, changes, instances, forks, versions, ended, scaleups = unpack(KEYS)
local epoch, since, at, max_finished_forks, max_changes, half_bytes, ttl_ms = unpack(ARGV, 1, 7)
local instance_head, instance_parts, fork_head, fork_parts = unpack(ARGV, 8, 11)
local CONFLICT, UNKNOWN, FIRST_BODY = 0, -1, 12
since = tonumber(since)

local known = redis.call('HMGET', meta, 'epoch', 'number', 'at', 'floor', 'half', 'half_bytes')
if known[1] ~= epoch then return false end
if tonumber(at) < tonumber(known[3]) then at = known[3] end
local number = tonumber(known[2])
local floor = tonumber(known[4] or '0')
local half, bytes = tonumber(known[5] or '1'), tonumber(known[6] or '0')
local missed = {}
if number ~= since then
    missed = redis.call('XRANGE', changes, '(' .. since .. '-0', '+')
    if #missed ~= number - since then return false end
end

local function complete(hash, head, patches)
    for _, patch in ipairs(patches) do
        local has_head = patch[2][head] or redis.call('HEXISTS', hash, patch[1] .. ' ' .. head) == 1
        if not has_head then return false end
    end
    return true
end

local function write(hash, patches)
    for _, patch in ipairs(patches) do
        local fields = {}
        for part, text in pairs(patch[2]) do
            table.insert(fields, patch[1] .. ' ' .. part)
            table.insert(fields, text)
        end
        redis.call('HSET', hash, unpack(fields))
    end
end

local function remove(hash, parts, id)
    local fields = {}
    for part in string.gmatch(parts, '%S+') do table.insert(fields, id .. ' ' .. part) end
    redis.call('HDEL', hash, unpack(fields))
end

-- The stream has two halves, so that a limit on its bytes needs only two numbers: once the newer half is full, the
-- older one is dropped.
local function append_change(text)
    bytes = bytes + #text
    if bytes > tonumber(half_bytes) then
        redis.call('XTRIM', changes, 'MINID', '=', half .. '-0')
        half, bytes = number, #text
    end
    redis.call('XADD', changes, 'MAXLEN', '~', max_changes, number .. '-0', 'body', text, 'at', at)
end

local function commit(text)
    local body = cjson.decode(text)
    if body.group ~= '' then
        local version = tonumber(redis.call('HGET', versions, body.group) or floor)
        if version ~= body.version then return CONFLICT end
    end
    if not complete(instances, instance_head, body.instances) then return UNKNOWN end
    if not complete(forks, fork_head, body.forks) then return UNKNOWN end
    write(instances, body.instances)
    write(forks, body.forks)
    for _, id in ipairs(body.removed) do remove(instances, instance_parts, id) end
    for _, each in ipairs(body.scaleups) do redis.call('HSET', scaleups, each[1], each[2]) end
    for _, id in ipairs(body.withdrawn) do redis.call('HDEL', scaleups, id) end
    number = redis.call('HINCRBY', meta, 'number', 1)
    if body.group ~= '' then redis.call('HSET', versions, body.group, number) end
    for _, group in ipairs(body.emptied) do
        redis.call('HDEL', versions, group)
        floor = number
    end
    for _, patch in ipairs(body.forks) do
        local finish = patch[2]['finish']
        if finish == 'null' then
            redis.call('ZREM', ended, patch[1])
        elseif finish then
            redis.call('ZADD', ended, 'NX', number, patch[1])
        end
    end
    append_change(text)
    return number
end

local verdicts = {}
for index = FIRST_BODY, #ARGV do table.insert(verdicts, commit(ARGV[index])) end

local excess = redis.call('ZCARD', ended) - tonumber(max_finished_forks)
if excess > 0 then
    local oldest = redis.call('ZPOPMIN', ended, excess)
    for index = 1, #oldest, 2 do remove(forks, fork_parts, oldest[index]) end
end
redis.call('HSET', meta, 'at', at, 'floor', floor, 'half', half, 'half_bytes', bytes)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
return {missed, verdicts, at}
"""

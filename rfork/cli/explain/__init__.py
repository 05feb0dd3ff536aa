"""`rfork explain`: why a fork took as long as it did, or fell back.

`account` adds up what a fork told, `causes` finds where its time went, `advice` what to do about errors,
`verdict` says it in two sentences, `picture` draws it, and `command` is what the user calls.
"""

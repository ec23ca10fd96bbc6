# Completion of longshore in bash.

_longshore() {
    local word
    COMPREPLY=()
    while IFS=$'\t' read -r word _; do
        COMPREPLY+=("$word")
    done < <("${COMP_WORDS[0]}" complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}

# Without a word to offer, bash completes file names.
complete -o bashdefault -o default -F _longshore longshore

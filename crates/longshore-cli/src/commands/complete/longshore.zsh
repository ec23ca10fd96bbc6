#compdef longshore
# Completion of longshore in zsh.

_longshore() {
    local line word help
    local -a candidates
    while IFS= read -r line; do
        word=${line%%$'\t'*}
        help=${line#"$word"}
        help=${help#$'\t'}
        candidates+=("${word//:/\\:}${help:+:$help}")
    done < <("${words[1]}" complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)
    if (( ${#candidates} )); then
        _describe -V longshore candidates
    else
        _files
    fi
}

if [[ "${funcstack[1]}" == _longshore ]]; then
    _longshore "$@"
else
    compdef _longshore longshore
fi

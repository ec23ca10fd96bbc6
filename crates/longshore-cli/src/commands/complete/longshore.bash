# Completion of longshore in bash.

_longshore() {
    local rest=$COMP_LINE kept='' at part trimmed word
    local -a words=()
    # bash also splits words at `:`, `=` and `@`, as in URLs. Parts without a space between
    # them are one word.
    for (( at = 0; at <= COMP_CWORD; at++ )); do
        part=${COMP_WORDS[at]}
        trimmed=${rest#"${rest%%[![:space:]]*}"}
        if (( at > 0 )) && [[ $trimmed == "$rest" ]]; then
            kept=${words[${#words[@]} - 1]}
        else
            kept=''
            words+=('')
        fi
        rest=${trimmed#"$part"}
        if (( at < COMP_CWORD )); then
            case $part in
                \'*\' | \"*\") part=${part:1:${#part} - 2} ;;
            esac
        fi
        words[${#words[@]} - 1]=$kept$part
    done
    # bash replaces only the last part of the word, or nothing if that is a separator.
    if [[ $part != *[!:=@]* ]]; then
        kept+=$part
    fi
    COMPREPLY=()
    while IFS=$'\t' read -r word _; do
        COMPREPLY+=("${word#"$kept"}")
    done < <("${words[0]}" complete -- "${words[@]:1}" 2>/dev/null)
}

# Without a word to offer, bash completes file names.
complete -o bashdefault -o default -F _longshore longshore

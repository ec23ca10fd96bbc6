# Completion of longshore in fish.

function __longshore_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l candidates ($words[1] complete -- $words[2..-1] "$current" 2>/dev/null)
    if test (count $candidates) -gt 0
        printf '%s\n' $candidates
    else
        __fish_complete_path "$current"
    end
end

complete -c longshore -f -a '(__longshore_complete)'

//! Parts of statements that end or remove members of flows: they add rows to `flow_changes`, and delete
//! links.

/// Notes the end of members of flows in `$rows`: id, flow. `$succeeded` says how they ended. Sorted, so that
/// changes are in the same order on both engines.
macro_rules! note_ends {
    ($rows:literal, $succeeded:literal) => {
        concat!(
            "
    noted_ends as (
      insert into longshore.flow_changes (flow, job, succeeded, failure)
      select n.flow, n.id, ",
            $succeeded,
            ", not ",
            $succeeded,
            "
        from ",
            $rows,
            " n
       where n.flow is not null
       order by n.id)"
        )
    };
}
pub(super) use note_ends;

/// Deletes the links from removed members to their parents. The links to their children stay, because they
/// say how the parent ended.
macro_rules! delete_links {
    ($ids:literal) => {
        concat!(
            "
    deleted_links as (
      delete from longshore.links
       where child = any(array(",
            $ids,
            "))),"
        )
    };
}
pub(super) use delete_links;

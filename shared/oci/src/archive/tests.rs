//! Tests of unpacking.

use tar::EntryType;

use super::{
    fixture::{gzip, header, tar},
    *,
};

const LIMIT: usize = 4096;

fn take(wanted: &'static str) -> impl Fn(&str) -> Choice {
    move |path| if path == wanted { Choice::Take } else { Choice::Skip }
}

fn read(content: &[u8]) -> Result<Vec<u8>, ArchiveError> {
    file(content, LIMIT, "a", take("a"))
}

fn is_damaged(result: &Result<Vec<u8>, ArchiveError>) -> bool {
    matches!(result, Err(ArchiveError::Unpack(_)))
}

#[test]
fn gzip_is_recognised_by_its_first_bytes() {
    for content in [&b"text"[..], b"", b"\x1f", &[0; 9]] {
        assert_eq!(unpacked(content, LIMIT).as_deref(), Ok(content));
        assert_eq!(unpacked(&gzip(content), LIMIT).as_deref(), Ok(content));
    }
    let members = [gzip(b"one "), gzip(b"two")].concat();
    assert_eq!(unpacked(&members, LIMIT).as_deref(), Ok(&b"one two"[..]), "a compressed blob that was split");
}

#[test]
fn unpacking_stops_at_the_limit() {
    let exact = vec![b'x'; LIMIT];
    assert_eq!(unpacked(&gzip(&exact), LIMIT).as_deref(), Ok(&exact[..]));
    let bomb = gzip(&vec![b'x'; 100 * LIMIT]);
    assert!(bomb.len() < LIMIT, "the bomb is small");
    assert_eq!(unpacked(&bomb, LIMIT), Err(ArchiveError::TooLarge(LIMIT)));
    assert_eq!(unpacked(&vec![b'x'; LIMIT + 1], LIMIT), Err(ArchiveError::TooLarge(LIMIT)));
    let large = tar(&[("other", &[b'x'; 2 * LIMIT]), ("a", b"1")]);
    assert_eq!(read(&gzip(&large)), Err(ArchiveError::TooLarge(LIMIT)), "skipped entries count");
}

#[test]
fn damaged_gzip_is_an_error() {
    let whole = gzip(b"some text that is long enough to be cut");
    for cut in 2..whole.len() {
        assert!(is_damaged(&unpacked(&whole[..cut], LIMIT)), "cut to {cut} bytes");
    }
    let mut flipped = whole.clone();
    let last = flipped.len() - 5;
    flipped[last] ^= 1;
    assert!(is_damaged(&unpacked(&flipped, LIMIT)), "the checksum is verified");
    let trailing = [&whole[..], b"garbage"].concat();
    assert!(is_damaged(&unpacked(&trailing, LIMIT)), "the rest is no gzip member");
}

#[test]
fn chosen_regular_file_is_read() {
    let mut content = header("a", EntryType::Directory, 0).as_bytes().to_vec();
    content.extend_from_slice(header("a", EntryType::Symlink, 0).as_bytes());
    content.extend(tar(&[("b", b"2"), ("a", b"1"), ("a", b"3")]));
    assert_eq!(read(&content).as_deref(), Ok(&b"1"[..]));
    assert_eq!(read(&gzip(&content)).as_deref(), Ok(&b"1"[..]));
    assert_eq!(read(&tar(&[("b", b"2")])), Err(ArchiveError::NoFile("a")));
    for empty in [&[0; 1024][..], &[]] {
        assert_eq!(read(empty), Err(ArchiveError::NoFile("a")));
    }
}

#[test]
fn only_the_first_entries_are_looked_at() {
    let others = |count| [vec![("b", &b""[..]); count], vec![("a", b"1")]].concat();
    let read = |files: &[_]| file(&tar(files), 1 << 20, "a", take("a"));
    assert!(read(&others(MAX_ENTRIES - 1)).is_ok());
    assert_eq!(read(&others(MAX_ENTRIES)), Err(ArchiveError::NoFile("a")));
}

#[test]
fn entry_that_claims_more_than_it_has_is_damaged() {
    for size in [2, 513, 1 << 33, u64::MAX / 2, u64::MAX] {
        let mut content = header("a", EntryType::Regular, size).as_bytes().to_vec();
        content.push(b'1');
        assert!(is_damaged(&read(&content)), "{size} bytes claimed: {:?}", read(&content));
        content[0] = b'b';
        let mut skipped = header("b", EntryType::Regular, size).as_bytes().to_vec();
        skipped.push(b'1');
        assert!(is_damaged(&read(&skipped)), "{size} bytes claimed of a skipped entry");
    }
}

#[test]
fn text_is_not_an_archive() {
    assert!(is_damaged(&read(&[b'x'; 600])));
    assert!(is_damaged(&read(b"short")));
}

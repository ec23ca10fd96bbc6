//! `resize_image`: fetches a picture or reads it from a folder, makes it fit and
//! writes it as PNG. Pictures come from strangers: what they may cost in bytes
//! and in memory is known before it is spent.

use std::fs::File;
use std::io::{Cursor, Read};
use std::path::{Component, Path, PathBuf};

use image::imageops::FilterType;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};
use longshore::worker::{Context, Failure};
use serde::Deserialize;
use serde_json::{Value, json};
use url::Url;

use super::folder::Folder;
use super::outbound::Outbound;
use super::{Kind, Settings, check_url, unless_stopped};
use crate::failure;

/// The largest side of a picture.
pub(super) const LARGEST_SIDE: u32 = 16_384;
/// The largest source, in bytes.
const LARGEST_SOURCE: usize = 20 * 1024 * 1024;
/// The most pixels that are held at a time: 32 Mi. Four bytes each when they
/// come and go, sixteen while they are worked on.
const MOST_PIXELS: u64 = 32 * 1024 * 1024;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ResizeImage {
    pub(super) source_url: String,
    pub(super) width: u32,
    pub(super) height: u32,
}

impl Kind for ResizeImage {
    const NAME: &'static str = "resize_image";

    fn check(&self) -> Result<(), String> {
        check_url("source_url", &self.source_url, &["https://", "http://", "file://"])?;
        for (field, side) in [("width", self.width), ("height", self.height)] {
            if side == 0 || side > LARGEST_SIDE {
                return Err(format!("{field}: {side} is not from 1 to {LARGEST_SIDE}"));
            }
        }
        Ok(())
    }

    fn schema() -> Value {
        let side = |which: &str| {
            json!({
                "type": "integer",
                "minimum": 1,
                "maximum": LARGEST_SIDE,
                "description": format!("The most pixels in {which}; the ratio is kept."),
            })
        };
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "resize_image",
            "type": "object",
            "properties": {
                "source_url": {
                    "type": "string",
                    "pattern": "^(https?|file)://\\S+$",
                    "description": "PNG, JPEG, GIF or WebP. http, inner addresses and file only if the worker \
                                    allows them.",
                },
                "width": side("width"),
                "height": side("height"),
            },
            "required": ["source_url", "width", "height"],
            "additionalProperties": false,
        })
    }
}

/// Where pictures come from and go to.
pub(super) struct Studio {
    outbound: Outbound,
    root: Option<Root>,
    output: Folder,
}

impl Studio {
    pub(super) fn open(settings: &Settings, outbound: Outbound) -> Result<Self, failure::Failure> {
        let root = settings.image_root.as_deref().map(Root::open).transpose()?;
        let output = Folder::new("--image-output", &settings.image_output)?;
        tracing::info!("pictures are written to {}", output.path().display());
        Ok(Studio { outbound, root, output })
    }

    async fn fetch(&self, ctx: &Context<Studio>, source: &str) -> Result<Vec<u8>, Failure> {
        if !source.starts_with("file://") {
            let target = self.outbound.target("source_url", source)?;
            return self.outbound.get(&target, LARGEST_SOURCE).await;
        }
        let Some(root) = self.root.clone() else {
            return Err(Failure::permanent(
                "source_url: this worker reads no files; name a folder that it may read with --image-root",
            ));
        };
        let source = source.to_owned();
        ctx.spawn_blocking(move || root.read(&source)).await?
    }
}

pub(super) async fn resize(job: ResizeImage, ctx: Context<Studio>) -> Result<(), Failure> {
    job.check().map_err(Failure::permanent)?;
    let studio = ctx.state();
    let source = unless_stopped(&ctx, studio.fetch(&ctx, &job.source_url)).await?;
    let picture = ctx.spawn_blocking(move || fit(&source, job.width, job.height)).await??;
    let Picture { png, width, height } = picture;
    let path = studio.output.put(&ctx, "png", png).await?;
    ctx.set_result(&json!({ "path": path, "width": width, "height": height }))?;
    Ok(())
}

/// The one folder that `file://` may read from.
#[derive(Clone)]
struct Root {
    /// As the operator names it, and so do URLs.
    named: PathBuf,
    /// Without links in it.
    real: PathBuf,
}

impl Root {
    fn open(path: &Path) -> Result<Self, failure::Failure> {
        match (std::path::absolute(path), path.canonicalize()) {
            (Ok(named), Ok(real)) if real.is_dir() => Ok(Root { named, real }),
            _ => Err(failure::Failure::usage(format_args!(
                "--image-root: `{}` is not a folder; name the one that file:// may read from",
                path.display()
            ))),
        }
    }

    fn read(&self, source: &str) -> Result<Vec<u8>, Failure> {
        let outside = || {
            Failure::permanent(
                "source_url: only files in the folder of --image-root are read; give their full path under it",
            )
        };
        let path = Url::parse(source).ok().and_then(|url| url.to_file_path().ok()).ok_or_else(outside)?;
        // Before asking the disk: whether a file outside exists is nobody's business.
        let below = path.starts_with(&self.named) || path.starts_with(&self.real);
        if !below || path.components().any(|part| part == Component::ParentDir) {
            return Err(outside());
        }
        let missing = |error| Failure::retry(format!("source_url: the file cannot be read: {error}"));
        // A link may still lead out.
        let real = path.canonicalize().map_err(missing)?;
        if !real.starts_with(&self.real) {
            return Err(outside());
        }
        // To open a pipe would wait for somebody to write.
        if !real.metadata().map_err(missing)?.is_file() {
            return Err(Failure::permanent("source_url: not a file; name one"));
        }
        let mut bytes = Vec::new();
        let mut file = File::open(real).map_err(missing)?.take(LARGEST_SOURCE as u64 + 1);
        file.read_to_end(&mut bytes).map_err(missing)?;
        if bytes.len() > LARGEST_SOURCE {
            return Err(Failure::permanent(format!(
                "source_url: over {LARGEST_SOURCE} bytes, which is the most"
            )));
        }
        Ok(bytes)
    }
}

struct Picture {
    png: Vec<u8>,
    width: u32,
    height: u32,
}

/// The picture as large as it can be within `width` × `height`.
fn fit(source: &[u8], width: u32, height: u32) -> Result<Picture, Failure> {
    let undecodable = |error| Failure::permanent(format!("source_url: no picture that can be read: {error}"));
    let mut reader = ImageReader::new(Cursor::new(source)).with_guessed_format()?;
    reader.limits(limits());
    let mut decoder = reader.into_decoder().map_err(undecodable)?;
    affordable(&[decoder.dimensions()])?;
    let turned = decoder.orientation().map_err(undecodable)?;
    let mut picture = DynamicImage::from_decoder(decoder).map_err(undecodable)?;
    // Cameras leave the turning to whoever shows the picture; PNG would not say.
    picture.apply_orientation(turned);

    let (new_width, new_height) = within(picture.width(), picture.height(), width, height);
    // The first pass works on columns, the second on rows.
    affordable(&[(picture.width(), new_height), (new_width, new_height)])?;
    let picture = picture.resize_exact(new_width, new_height, FilterType::Lanczos3);
    let mut png = Vec::new();
    picture.write_to(&mut Cursor::new(&mut png), ImageFormat::Png)?;
    Ok(Picture { png, width: new_width, height: new_height })
}

fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.max_image_width = Some(LARGEST_SIDE);
    limits.max_image_height = Some(LARGEST_SIDE);
    // Eight bytes a pixel at most, and as much again for the decoder itself.
    limits.max_alloc = Some(MOST_PIXELS * 16);
    limits
}

/// Refuses what would take too much memory, before it does.
fn affordable(sizes: &[(u32, u32)]) -> Result<(), Failure> {
    for (width, height) in sizes {
        if u64::from(*width) * u64::from(*height) > MOST_PIXELS || *width.max(height) > LARGEST_SIDE {
            return Err(Failure::permanent(format!(
                "a picture of {width} × {height} is more than this worker takes on: \
                 {LARGEST_SIDE} a side, {MOST_PIXELS} pixels in all"
            )));
        }
    }
    Ok(())
}

/// The largest size of the same ratio within a box; at least one pixel a side.
fn within(width: u32, height: u32, most_width: u32, most_height: u32) -> (u32, u32) {
    let [w, h, mw, mh] = [width, height, most_width, most_height].map(|side| u64::from(side.max(1)));
    // Which side meets the box first, without fractions: mw/w against mh/h.
    let (w, h) = if mw * h <= mh * w { (mw, rounded(h * mw, w)) } else { (rounded(w * mh, h), mh) };
    let side = |side: u64| u32::try_from(side.max(1)).unwrap_or(u32::MAX);
    (side(w).min(most_width), side(h).min(most_height))
}

fn rounded(product: u64, by: u64) -> u64 {
    (product + by / 2) / by
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use image::{Rgb, RgbImage};
    use longshore::{JobRecord, Status};

    use super::*;
    use crate::builtin::testing::{Scratch, Server, run, run_to_the_end};

    fn picture(width: u32, height: u32, format: ImageFormat) -> Vec<u8> {
        let mut bytes = Vec::new();
        let picture = RgbImage::from_pixel(width, height, Rgb([200, 30, 30]));
        DynamicImage::from(picture).write_to(&mut Cursor::new(&mut bytes), format).unwrap();
        bytes
    }

    fn settings(scratch: &Scratch) -> Settings {
        Settings {
            image_root: Some(scratch.path().join("in")),
            image_output: scratch.path().join("out"),
            allow_http: true,
            allow_outbound: vec!["127.0.0.1".parse().unwrap()],
            ..Settings::default()
        }
    }

    fn scratch() -> Scratch {
        let scratch = Scratch::new();
        std::fs::create_dir(scratch.path().join("in")).unwrap();
        scratch
    }

    async fn resized(settings: &Settings, source: &str) -> JobRecord {
        run(settings, "resize_image", &json!({ "source_url": source, "width": 40, "height": 40 })).await
    }

    #[tokio::test]
    async fn a_fetched_picture_fits_and_keeps_its_ratio() {
        let scratch = scratch();
        for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::Gif, ImageFormat::WebP] {
            let source = picture(100, 50, format);
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", source.len());
            let mut server = Server::sending(vec![[head.as_bytes(), &source].concat()]).await;
            let url = format!("http://127.0.0.1:{}/a", server.port());
            let job = resized(&settings(&scratch), &url).await;
            assert_eq!(job.status, Status::Succeeded, "{format:?}: {:?}", job.last_error);
            assert!(server.heard().await.starts_with("GET /a HTTP/1.1\r\n"));
            let path = scratch.path().join("out").join(format!("{}.png", job.id));
            let result: Value = serde_json::from_str(job.result.unwrap().get()).unwrap();
            assert_eq!(result, json!({ "path": path, "width": 40, "height": 20 }));
            let written = image::open(path).unwrap();
            assert_eq!((written.width(), written.height()), (40, 20));
        }
        let left = std::fs::read_dir(scratch.path().join("out")).unwrap();
        assert_eq!(left.count(), 4, "nothing half written is left");
    }

    #[tokio::test]
    async fn a_file_is_read_from_the_one_folder_and_from_nowhere_else() {
        let scratch = scratch();
        let inside = scratch.path().join("in");
        std::fs::create_dir(inside.join("sub")).unwrap();
        std::fs::write(inside.join("sub/a b.png"), picture(80, 80, ImageFormat::Png)).unwrap();
        std::fs::write(scratch.path().join("outside.png"), picture(80, 80, ImageFormat::Png)).unwrap();
        std::fs::create_dir(scratch.path().join("in-not")).unwrap();
        std::fs::write(scratch.path().join("in-not/a.png"), picture(80, 80, ImageFormat::Png)).unwrap();
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(scratch.path().join("outside.png"), inside.join("link.png")).unwrap();
            std::os::unix::fs::symlink(scratch.path(), inside.join("up")).unwrap();
        }
        let (settings, root) = (settings(&scratch), inside.display());
        let job = resized(&settings, &format!("file://{root}/sub/a%20b.png")).await;
        assert_eq!(job.status, Status::Succeeded, "{:?}", job.last_error);

        for source in [
            format!("file://{root}/../outside.png"),
            format!("file://{root}/%2e%2e/outside.png"),
            format!("file://{root}/sub/..%2f..%2foutside.png"),
            format!("file://{root}/sub/..%2f..%2fno-such.png"),
            format!("file://{root}-not/a.png"),
            format!("file://{}/outside.png", scratch.path().display()),
            format!("file://example.com{root}/sub/a%20b.png"),
            "file:///etc/passwd".into(),
            "file:///there/is/no/such.png".into(),
            #[cfg(unix)]
            format!("file://{root}/link.png"),
            #[cfg(unix)]
            format!("file://{root}/up/outside.png"),
        ] {
            let job = resized(&settings, &source).await;
            assert_eq!(job.status, Status::FailedPermanent, "{source}");
            let told = job.last_error.unwrap();
            assert!(told.contains("--image-root"), "{source}: {told}");
        }
        let missing = resized(&settings, &format!("file://{root}/later.png")).await;
        assert_eq!(missing.status, Status::Retrying, "it may still come");
        let folder = resized(&settings, &format!("file://{root}/sub")).await;
        assert_eq!(folder.status, Status::FailedPermanent);
        let none = Settings { image_root: None, ..settings };
        let told = resized(&none, &format!("file://{root}/sub/a%20b.png")).await.last_error.unwrap();
        assert!(told.contains("reads no files"), "{told}");
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_folder_reached_by_a_link_is_known_by_either_name() {
        let scratch = scratch();
        let (real, link) = (scratch.path().join("in"), scratch.path().join("link"));
        std::os::unix::fs::symlink(&real, &link).unwrap();
        std::fs::write(real.join("a.png"), picture(80, 80, ImageFormat::Png)).unwrap();
        let settings = Settings { image_root: Some(link.clone()), ..settings(&scratch) };
        for root in [real, link] {
            let job = resized(&settings, &format!("file://{}/a.png", root.display())).await;
            assert_eq!(job.status, Status::Succeeded, "{:?}", job.last_error);
        }
    }

    #[tokio::test]
    async fn what_is_no_picture_fails_for_good() {
        let scratch = scratch();
        let cut = picture(100, 100, ImageFormat::Png);
        for (name, bytes) in [("text", &b"<svg/>"[..]), ("empty", b""), ("cut.png", &cut[..cut.len() / 2])] {
            let path = scratch.path().join("in").join(name);
            std::fs::write(&path, bytes).unwrap();
            let payload =
                json!({ "source_url": format!("file://{}", path.display()), "width": 40, "height": 40 });
            let job = run_to_the_end(&settings(&scratch), "resize_image", &payload).await;
            assert_eq!((job.status, job.attempts), (Status::FailedPermanent, 1), "{name}");
            assert!(job.last_error.unwrap().starts_with("source_url: no picture"), "{name}");
        }
    }

    /// The head of a PNG that says it has this size.
    fn bomb(width: u32, height: u32) -> Vec<u8> {
        let mut bytes = picture(1, 1, ImageFormat::Png);
        bytes[16..20].copy_from_slice(&width.to_be_bytes());
        bytes[20..24].copy_from_slice(&height.to_be_bytes());
        let sum = crc32(&bytes[12..29]);
        bytes[29..33].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    fn crc32(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(u32::MAX, |sum, byte| {
            (0..8)
                .fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 & (sum & 1).wrapping_neg()))
        })
    }

    #[test]
    fn what_would_take_too_much_memory_is_refused_before_it_does() {
        assert!(fit(&bomb(1, 1), 5, 5).is_ok(), "the sum is right");
        for (width, height, told) in [
            (60_000, 60_000, "exceeds limit"),
            (LARGEST_SIDE + 1, 1, "exceeds limit"),
            (1, u32::MAX / 2, "exceeds limit"),
            (16_384, 16_384, "16384 × 16384 is more than"),
            (8_192, 4_097, "8192 × 4097 is more than"),
        ] {
            let refused = format!("{:?}", fit(&bomb(width, height), 5, 5).err().unwrap());
            assert!(refused.starts_with("permanent: ") && refused.contains(told), "{refused}");
        }
        let small = picture(3, 3, ImageFormat::Png);
        let refused = format!("{:?}", fit(&small, LARGEST_SIDE, LARGEST_SIDE).err().unwrap());
        assert!(refused.contains("16384 × 16384 is more than"), "{refused}");
    }

    #[test]
    fn sizes_fit_the_box_and_keep_the_ratio() {
        for (size, most, fits) in [
            ((100, 50), (40, 40), (40, 20)),
            ((50, 100), (40, 40), (20, 40)),
            ((100, 100), (40, 30), (30, 30)),
            ((10, 10), (40, 40), (40, 40)),
            ((1000, 1), (10, 10), (10, 1)),
            ((1, 1000), (10, 10), (1, 10)),
            ((3, 2), (100, 100), (100, 67)),
            ((16_384, 1), (16_384, 16_384), (16_384, 1)),
        ] {
            assert_eq!(within(size.0, size.1, most.0, most.1), fits, "{size:?} in {most:?}");
        }
    }

    #[test]
    fn a_root_that_is_no_folder_is_refused_by_its_flag() {
        let outbound = Outbound::new(super::super::Rules::of(&Settings::default())).unwrap();
        let settings = Settings { image_root: Some("/there/is/no/such".into()), ..Settings::default() };
        let refused = Studio::open(&settings, outbound).err().unwrap().to_string();
        assert!(refused.starts_with("--image-root: "), "{refused}");
    }
}

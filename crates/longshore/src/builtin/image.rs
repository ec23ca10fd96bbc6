//! `resize_image`: fetches an image or reads it from a folder, scales it to fit and
//! writes it as PNG. Images come from untrusted sources, so the limits on bytes and
//! memory are checked before either is used.

use std::fs::File;
use std::io::{Cursor, Read};
use std::path::{Component, Path, PathBuf};

use image::imageops::FilterType;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};
use serde::Deserialize;
use serde_json::{Value, json};
use url::Url;

use super::folder::Folder;
use super::outbound::Outbound;
use super::{Kind, Settings, check_url, unless_stopped};
use crate::error::{Error, Result};
use crate::worker::{Context, Failure};

/// The largest width or height, in pixels.
pub(super) const MAX_SIDE: u32 = 16_384;
/// The largest source file, in bytes.
const MAX_SOURCE_BYTES: usize = 20 * 1024 * 1024;
/// The largest number of pixels of an image: 32 Mi.
const MAX_PIXELS: u64 = 32 * 1024 * 1024;
/// The limit of bytes in memory at a time. A pixel takes up to 8 bytes in the source and the
/// result, and 16 between the two steps of the filter.
const MAX_MEMORY: u64 = 256 * 1024 * 1024;
const BYTES_BETWEEN_STEPS: u64 = 16;

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
            if side == 0 || side > MAX_SIDE {
                return Err(format!("{field}: {side} is out of range; use 1 to {MAX_SIDE}"));
            }
        }
        Ok(())
    }

    fn schema() -> Value {
        let side = |name: &str| {
            json!({
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_SIDE,
                "description": format!("The maximum {name} in pixels; the aspect ratio is kept."),
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
                    "description": "A PNG, JPEG, GIF or WebP image. http and file URLs and internal addresses \
                                    only if the worker allows them.",
                },
                "width": side("width"),
                "height": side("height"),
            },
            "required": ["source_url", "width", "height"],
            "additionalProperties": false,
        })
    }
}

/// Reads source images and writes the results.
pub(super) struct Images {
    outbound: Outbound,
    root: Option<Root>,
    output: Folder,
}

impl Images {
    pub(super) fn open(settings: &Settings, outbound: Outbound) -> Result<Self> {
        let root = settings.image_root.as_deref().map(Root::open).transpose()?;
        let output = Folder::new("image_output", &settings.image_output)?;
        tracing::info!("resized images are written to {}", output.path().display());
        Ok(Images { outbound, root, output })
    }

    async fn fetch(&self, ctx: &Context<Images>, source: &str) -> Result<Vec<u8>, Failure> {
        if !source.starts_with("file://") {
            let target = self.outbound.target("source_url", source)?;
            return self.outbound.get(&target, MAX_SOURCE_BYTES).await;
        }
        let Some(root) = self.root.clone() else {
            return Err(Failure::permanent(
                "source_url: this worker does not read files; set the folder that it may read with `image_root` (--image-root)",
            ));
        };
        let source = source.to_owned();
        ctx.spawn_blocking(move || root.read(&source)).await?
    }
}

pub(super) async fn resize(job: ResizeImage, ctx: Context<Images>) -> Result<(), Failure> {
    job.check().map_err(Failure::permanent)?;
    let images = ctx.state();
    let source = unless_stopped(&ctx, images.fetch(&ctx, &job.source_url)).await?;
    let resized = ctx.spawn_blocking(move || resize_to_fit(&source, job.width, job.height)).await??;
    let Resized { png, width, height } = resized;
    let path = images.output.write(&ctx, "png", png).await?;
    ctx.set_result(&json!({ "path": path, "width": width, "height": height }))?;
    Ok(())
}

/// The only folder that `file://` URLs may read from.
#[derive(Clone)]
struct Root {
    /// The path as configured. URLs may use it.
    configured: PathBuf,
    /// The path with all symbolic links resolved.
    real: PathBuf,
}

impl Root {
    fn open(path: &Path) -> Result<Self> {
        match (std::path::absolute(path), path.canonicalize()) {
            (Ok(configured), Ok(real)) if real.is_dir() => Ok(Root { configured, real }),
            _ => Err(Error::invalid(
                "image_root",
                format!(
                    "image_root: `{}` is not a folder; set the folder that file:// URLs may read from",
                    path.display()
                ),
            )),
        }
    }

    fn read(&self, source: &str) -> Result<Vec<u8>, Failure> {
        let outside = || {
            Failure::permanent(
                "source_url: only files in the folder of `image_root` (--image-root) may be read; use a full path in that folder",
            )
        };
        let path = Url::parse(source).ok().and_then(|url| url.to_file_path().ok()).ok_or_else(outside)?;
        // Check before accessing the disk, so that nobody can probe whether a file
        // outside the folder exists.
        let inside = path.starts_with(&self.configured) || path.starts_with(&self.real);
        if !inside || path.components().any(|part| part == Component::ParentDir) {
            return Err(outside());
        }
        let unreadable = |error| Failure::retry(format!("source_url: the file cannot be read: {error}"));
        // A symbolic link may still point outside.
        let real = path.canonicalize().map_err(unreadable)?;
        if !real.starts_with(&self.real) {
            return Err(outside());
        }
        // Opening a named pipe would block until another process writes to it.
        if !real.metadata().map_err(unreadable)?.is_file() {
            return Err(Failure::permanent("source_url: not a regular file; use the path of an image file"));
        }
        let mut bytes = Vec::new();
        let mut file = File::open(real).map_err(unreadable)?.take(MAX_SOURCE_BYTES as u64 + 1);
        file.read_to_end(&mut bytes).map_err(unreadable)?;
        if bytes.len() > MAX_SOURCE_BYTES {
            return Err(Failure::permanent(format!(
                "source_url: the file is larger than {MAX_SOURCE_BYTES} bytes, the limit"
            )));
        }
        Ok(bytes)
    }
}

struct Resized {
    png: Vec<u8>,
    width: u32,
    height: u32,
}

/// Scales the image to the largest size that fits into `width` × `height`.
fn resize_to_fit(source: &[u8], width: u32, height: u32) -> Result<Resized, Failure> {
    let undecodable = |error| Failure::permanent(format!("source_url: the image cannot be decoded: {error}"));
    let mut reader = ImageReader::new(Cursor::new(source)).with_guessed_format()?;
    reader.limits(limits());
    let mut decoder = reader.into_decoder().map_err(undecodable)?;
    check_size(decoder.dimensions())?;
    // Rotating an image copies it.
    let source_bytes = decoder.total_bytes();
    check_memory(decoder.dimensions(), source_bytes.saturating_mul(2))?;
    let orientation = decoder.orientation().map_err(undecodable)?;
    let mut image = DynamicImage::from_decoder(decoder).map_err(undecodable)?;
    // Cameras store photos unrotated and record the orientation in the metadata, which
    // the PNG will not have.
    image.apply_orientation(orientation);

    let (new_width, new_height) = fit_into(image.width(), image.height(), width, height);
    check_size((new_width, new_height))?;
    // The filter scales vertically first, then horizontally.
    let between = u64::from(image.width()) * u64::from(new_height) * BYTES_BETWEEN_STEPS;
    let result = pixels((new_width, new_height)) * u64::from(image.color().bytes_per_pixel());
    check_memory((new_width, new_height), source_bytes + between + result)?;
    let image = image.resize_exact(new_width, new_height, FilterType::Lanczos3);
    let mut png = Vec::new();
    image.write_to(&mut Cursor::new(&mut png), ImageFormat::Png)?;
    Ok(Resized { png, width: new_width, height: new_height })
}

fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.max_image_width = Some(MAX_SIDE);
    limits.max_image_height = Some(MAX_SIDE);
    limits.max_alloc = Some(MAX_MEMORY);
    limits
}

fn pixels((width, height): (u32, u32)) -> u64 {
    u64::from(width) * u64::from(height)
}

/// Refuses a size with too many pixels.
fn check_size(size: (u32, u32)) -> Result<(), Failure> {
    let (width, height) = size;
    if pixels(size) > MAX_PIXELS || width.max(height) > MAX_SIDE {
        return Err(Failure::permanent(format!(
            "an image of {width} × {height} is too large; the limit is {MAX_SIDE} pixels per side and \
             {MAX_PIXELS} pixels in total"
        )));
    }
    Ok(())
}

/// Refuses an image for which this many bytes would be needed at a time, before they are allocated.
fn check_memory((width, height): (u32, u32), bytes: u64) -> Result<(), Failure> {
    if bytes > MAX_MEMORY {
        let mebibytes = |bytes: u64| bytes.div_ceil(1024 * 1024);
        return Err(Failure::permanent(format!(
            "an image of {width} × {height} needs {} MiB of memory; the limit is {} MiB, so use a smaller image or \
             fewer bits per pixel",
            mebibytes(bytes),
            mebibytes(MAX_MEMORY)
        )));
    }
    Ok(())
}

/// The largest size with the same aspect ratio that fits into a box; at least one pixel
/// per side.
fn fit_into(width: u32, height: u32, max_width: u32, max_height: u32) -> (u32, u32) {
    let [w, h, mw, mh] = [width, height, max_width, max_height].map(|side| u64::from(side.max(1)));
    // Compares mw/w with mh/h in integers, to find the side that limits the scale.
    let (w, h) = if mw * h <= mh * w { (mw, rounded_div(h * mw, w)) } else { (rounded_div(w * mh, h), mh) };
    let side = |side: u64| u32::try_from(side.max(1)).unwrap_or(u32::MAX);
    (side(w).min(max_width), side(h).min(max_height))
}

fn rounded_div(dividend: u64, divisor: u64) -> u64 {
    (dividend + divisor / 2) / divisor
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use image::{Rgb, RgbImage};

    use super::*;
    use crate::builtin::testing::{Server, TempFolder, run, run_without_backoff};
    use crate::{JobRecord, Status};

    fn encoded(width: u32, height: u32, format: ImageFormat) -> Vec<u8> {
        let mut bytes = Vec::new();
        let image = RgbImage::from_pixel(width, height, Rgb([200, 30, 30]));
        DynamicImage::from(image).write_to(&mut Cursor::new(&mut bytes), format).unwrap();
        bytes
    }

    fn settings(temp: &TempFolder) -> Settings {
        Settings {
            image_root: Some(temp.path().join("in")),
            image_output: temp.path().join("out"),
            allow_http: true,
            allow_outbound: vec!["127.0.0.1".parse().unwrap()],
            ..Settings::default()
        }
    }

    fn temp_folder() -> TempFolder {
        let temp = TempFolder::new();
        std::fs::create_dir(temp.path().join("in")).unwrap();
        temp
    }

    async fn run_resize(settings: &Settings, source: &str) -> JobRecord {
        run(settings, "resize_image", &json!({ "source_url": source, "width": 40, "height": 40 })).await
    }

    #[tokio::test]
    async fn a_fetched_image_is_scaled_to_fit_and_keeps_its_ratio() {
        let temp = temp_folder();
        for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::Gif, ImageFormat::WebP] {
            let source = encoded(100, 50, format);
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", source.len());
            let mut server = Server::responding_bytes(vec![[head.as_bytes(), &source].concat()]).await;
            let url = format!("http://127.0.0.1:{}/a", server.port());
            let job = run_resize(&settings(&temp), &url).await;
            assert_eq!(job.status, Status::Succeeded, "{format:?}: {:?}", job.last_error);
            assert!(server.next_request().await.starts_with("GET /a HTTP/1.1\r\n"));
            let path = temp.path().join("out").join(format!("{}.png", job.id));
            let result: Value = serde_json::from_str(job.result.unwrap().get()).unwrap();
            assert_eq!(result, json!({ "path": path, "width": 40, "height": 20 }));
            let written = image::open(path).unwrap();
            assert_eq!((written.width(), written.height()), (40, 20));
        }
        let files = std::fs::read_dir(temp.path().join("out")).unwrap();
        assert_eq!(files.count(), 4, "no partial file is left");
    }

    #[tokio::test]
    async fn files_are_read_only_from_the_configured_folder() {
        let temp = temp_folder();
        let inside = temp.path().join("in");
        std::fs::create_dir(inside.join("sub")).unwrap();
        std::fs::write(inside.join("sub/a b.png"), encoded(80, 80, ImageFormat::Png)).unwrap();
        std::fs::write(temp.path().join("outside.png"), encoded(80, 80, ImageFormat::Png)).unwrap();
        std::fs::create_dir(temp.path().join("in-not")).unwrap();
        std::fs::write(temp.path().join("in-not/a.png"), encoded(80, 80, ImageFormat::Png)).unwrap();
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(temp.path().join("outside.png"), inside.join("link.png")).unwrap();
            std::os::unix::fs::symlink(temp.path(), inside.join("up")).unwrap();
        }
        let (settings, root) = (settings(&temp), inside.display());
        let job = run_resize(&settings, &format!("file://{root}/sub/a%20b.png")).await;
        assert_eq!(job.status, Status::Succeeded, "{:?}", job.last_error);

        for source in [
            format!("file://{root}/../outside.png"),
            format!("file://{root}/%2e%2e/outside.png"),
            format!("file://{root}/sub/..%2f..%2foutside.png"),
            format!("file://{root}/sub/..%2f..%2fno-such.png"),
            format!("file://{root}-not/a.png"),
            format!("file://{}/outside.png", temp.path().display()),
            format!("file://example.com{root}/sub/a%20b.png"),
            "file:///etc/passwd".into(),
            "file:///there/is/no/such.png".into(),
            #[cfg(unix)]
            format!("file://{root}/link.png"),
            #[cfg(unix)]
            format!("file://{root}/up/outside.png"),
        ] {
            let job = run_resize(&settings, &source).await;
            assert_eq!(job.status, Status::FailedPermanent, "{source}");
            let error = job.last_error.unwrap();
            assert!(error.contains("--image-root"), "{source}: {error}");
        }
        let missing = run_resize(&settings, &format!("file://{root}/later.png")).await;
        assert_eq!(missing.status, Status::Retrying, "the file may appear later");
        let folder = run_resize(&settings, &format!("file://{root}/sub")).await;
        assert_eq!(folder.status, Status::FailedPermanent);
        let without_root = Settings { image_root: None, ..settings };
        let job = run_resize(&without_root, &format!("file://{root}/sub/a%20b.png")).await;
        let error = job.last_error.unwrap();
        assert!(error.contains("does not read files"), "{error}");
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_root_that_is_a_link_can_be_used_by_both_names() {
        let temp = temp_folder();
        let (real, link) = (temp.path().join("in"), temp.path().join("link"));
        std::os::unix::fs::symlink(&real, &link).unwrap();
        std::fs::write(real.join("a.png"), encoded(80, 80, ImageFormat::Png)).unwrap();
        let settings = Settings { image_root: Some(link.clone()), ..settings(&temp) };
        for root in [real, link] {
            let job = run_resize(&settings, &format!("file://{}/a.png", root.display())).await;
            assert_eq!(job.status, Status::Succeeded, "{:?}", job.last_error);
        }
    }

    #[tokio::test]
    async fn a_file_that_is_not_an_image_fails_permanently() {
        let temp = temp_folder();
        let png = encoded(100, 100, ImageFormat::Png);
        let truncated = &png[..png.len() / 2];
        for (name, bytes) in [("text", &b"<svg/>"[..]), ("empty", b""), ("truncated.png", truncated)] {
            let path = temp.path().join("in").join(name);
            std::fs::write(&path, bytes).unwrap();
            let payload =
                json!({ "source_url": format!("file://{}", path.display()), "width": 40, "height": 40 });
            let job = run_without_backoff(&settings(&temp), "resize_image", &payload).await;
            assert_eq!((job.status, job.attempts), (Status::FailedPermanent, 1), "{name}");
            assert!(job.last_error.unwrap().starts_with("source_url: the image cannot be decoded"), "{name}");
        }
    }

    /// A PNG whose header declares this size.
    fn png_declaring(width: u32, height: u32) -> Vec<u8> {
        resized_header(encoded(1, 1, ImageFormat::Png), width, height)
    }

    fn resized_header(mut bytes: Vec<u8>, width: u32, height: u32) -> Vec<u8> {
        bytes[16..20].copy_from_slice(&width.to_be_bytes());
        bytes[20..24].copy_from_slice(&height.to_be_bytes());
        let checksum = crc32(&bytes[12..29]);
        bytes[29..33].copy_from_slice(&checksum.to_be_bytes());
        bytes
    }

    fn crc32(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(u32::MAX, |sum, byte| {
            (0..8)
                .fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 & (sum & 1).wrapping_neg()))
        })
    }

    #[test]
    fn an_image_that_would_need_too_much_memory_is_refused() {
        assert!(resize_to_fit(&png_declaring(1, 1), 5, 5).is_ok(), "the checksum is correct");
        for (width, height, expected) in [
            (60_000, 60_000, "exceeds limit"),
            (MAX_SIDE + 1, 1, "exceeds limit"),
            (1, u32::MAX / 2, "exceeds limit"),
            (16_384, 16_384, "16384 × 16384 is too large"),
            (8_192, 4_097, "8192 × 4097 is too large"),
        ] {
            let error = format!("{:?}", resize_to_fit(&png_declaring(width, height), 5, 5).err().unwrap());
            assert!(error.starts_with("permanent: ") && error.contains(expected), "{error}");
        }
        let small = encoded(3, 3, ImageFormat::Png);
        let error = format!("{:?}", resize_to_fit(&small, MAX_SIDE, MAX_SIDE).err().unwrap());
        assert!(error.contains("16384 × 16384 is too large"), "{error}");
    }

    #[test]
    fn an_image_with_many_bytes_per_pixel_is_refused_before_they_are_allocated() {
        let mut deep = Vec::new();
        let image = image::ImageBuffer::from_pixel(1, 1, image::Rgba([1_u16, 2, 3, 4]));
        DynamicImage::ImageRgba16(image).write_to(&mut Cursor::new(&mut deep), ImageFormat::Png).unwrap();
        let declaring = |width, height| resized_header(deep.clone(), width, height);
        assert!(resize_to_fit(&declaring(1, 1), 5, 5).is_ok());
        let error = format!("{:?}", resize_to_fit(&declaring(8192, 2049), 5, 5).err().unwrap());
        assert!(error.contains("8192 × 2049 needs 257 MiB"), "{error}");
        // The source fits, but not what the filter makes of it.
        let mut wide = Vec::new();
        let image = DynamicImage::ImageLuma8(image::GrayImage::new(8192, 1024));
        image.write_to(&mut Cursor::new(&mut wide), ImageFormat::Png).unwrap();
        let error = format!("{:?}", resize_to_fit(&wide, 16_384, 16_384).err().unwrap());
        assert!(error.contains("16384 × 2048 needs 296 MiB"), "{error}");
    }

    #[test]
    fn sizes_fit_the_box_and_keep_the_ratio() {
        for (size, limit, expected) in [
            ((100, 50), (40, 40), (40, 20)),
            ((50, 100), (40, 40), (20, 40)),
            ((100, 100), (40, 30), (30, 30)),
            ((10, 10), (40, 40), (40, 40)),
            ((1000, 1), (10, 10), (10, 1)),
            ((1, 1000), (10, 10), (1, 10)),
            ((3, 2), (100, 100), (100, 67)),
            ((16_384, 1), (16_384, 16_384), (16_384, 1)),
        ] {
            assert_eq!(fit_into(size.0, size.1, limit.0, limit.1), expected, "{size:?} in {limit:?}");
        }
    }

    #[test]
    fn a_root_that_is_not_a_folder_is_refused_with_the_name_of_its_setting() {
        let outbound = Outbound::new(super::super::Rules::of(&Settings::default())).unwrap();
        let settings = Settings { image_root: Some("/there/is/no/such".into()), ..Settings::default() };
        let error = Images::open(&settings, outbound).err().unwrap().to_string();
        assert!(error.starts_with("image_root: "), "{error}");
    }
}

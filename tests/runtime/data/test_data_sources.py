"""Results of ``input_fn``: arrays, datasets of both frameworks, folders of images."""

import subprocess
import sys
from multiprocessing import get_context

import numpy as np
import pytest

from hetctl.images import ImageFolder, decode_and_crop, in_turn, random_crop_and_flip, scale
from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.runtime.data.sampler import sample_rng
from hetctl.runtime.data.sources import ArraySource, SampleSpec, as_source, as_sources

ARRAYS = (np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6))


def equal(source, x, y):
    assert len(source) == len(x) == len(y)
    for number in reversed(range(len(source))):
        prepared = source.prepare(number)
        np.testing.assert_array_equal(prepared[0], x[number])
        np.testing.assert_array_equal(prepared[1], y[number])
        assert source.spec == SampleSpec.of(*prepared, "")


@pytest.fixture
def folder(tmp_path):
    """Two classes of images of different sizes, in JPEG and PNG."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(1)
    for name, files in {"dog": ["b.jpg", "a.JPEG"], "cat": ["1.png", "notes.txt", ".hidden.png"]}.items():
        (tmp_path / name).mkdir()
        for number, file in enumerate(files):
            if file.endswith(".txt"):
                (tmp_path / name / file).write_text("no image")
            else:
                pixels = rng.integers(0, 256, (40 + 9 * number, 60, 3), dtype=np.uint8)
                kind = "PNG" if file.endswith("png") else "JPEG"
                image.fromarray(pixels).save(tmp_path / name / file, kind)
    (tmp_path / ".cache").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "NoneType, not"),
        (3, "int, not"),
        ((ARRAYS,), "tuple, not"),
        (([1, 2], [1, 2]), "list for training"),
        ((ARRAYS, None), "NoneType for validation"),
        ((ARRAYS, ARRAYS[0]), "ndarray for validation"),
        ((ARRAYS, {"x": [1], "y": [2]}), "dict for validation"),
        ((ARRAYS, ([1, 2], [1])), "2 validation inputs and 1 targets"),
        ((([], []), ARRAYS), "0 training inputs and 0 targets"),
    ],
)
def test_other_shapes_are_refused(data, said):
    with pytest.raises(BadInputError, match=f"input_fn returned {said}"):
        as_sources(data)


def test_a_pair_of_arrays():
    training, validation = as_sources((ARRAYS, [[[1.5], [2.5]], [0, 1]]))
    equal(training, *ARRAYS)
    assert training.spec == SampleSpec((2,), np.dtype("f4"), (), np.dtype("i8"))
    assert training.spec.record.itemsize == 16
    equal(validation, np.array([[1.5], [2.5]]), np.array([0, 1]))
    x, _ = training.prepare(2)
    assert training.augment(x, np.random.default_rng(1)) is x


def test_text_is_as_wide_in_every_sample():
    text = np.array(["a", "four", "sixsix"])
    source = as_source((text, np.arange(3)), "training")
    assert source.spec.x_dtype == text.dtype
    equal(source, text, np.arange(3))


def test_data_on_disk_is_read_as_needed():
    class OnDisk:
        read = 0

        def __len__(self):
            return 10**6

        def __getitem__(self, numbers):
            assert isinstance(numbers, np.ndarray)
            OnDisk.read += len(numbers)
            return numbers * 2.0

    source = as_source((OnDisk(), OnDisk()), "training")
    assert source.prepare(777_777) == (777_777 * 2.0, 777_777 * 2.0)
    assert OnDisk.read == 4


def test_objects_have_no_size():
    ragged = np.array([[1], [1, 2]], dtype=object)
    with pytest.raises(BadInputError, match="x of training sample 0 is of type object"):
        as_source((ragged, [0, 1]), "training")


class Dataset:
    def __init__(self, samples):
        self._samples = samples

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, number):
        return self._samples[number]


def test_a_dataset_by_number():
    equal(as_source(Dataset(list(zip(*ARRAYS, strict=True))), "training"), *ARRAYS)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ((np.zeros(3), 1.0), r"x of validation sample 1 has shape \(3,\) and type float64"),
        ((np.zeros(2), 1), "y of validation sample 1 .* type int64, that of sample 0 .* float64"),
        (np.zeros(2), "validation sample 1 is ndarray, not a pair"),
    ],
)
def test_a_sample_of_another_form_is_named(odd, said):
    source = as_source(Dataset([(np.zeros(2), 1.0), odd]), "validation")
    source.prepare(0)
    with pytest.raises(BadInputError, match=said):
        source.prepare(1)


def test_an_empty_dataset_is_refused():
    with pytest.raises(TransientInputError, match="input_fn returned 0 training samples"):
        as_source(Dataset([]), "training")


def test_a_pytorch_dataset_gives_its_samples_if_it_has_an_end():
    torch = pytest.importorskip("torch")
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    equal(as_source(torch.utils.data.TensorDataset(x, y), "training"), x.numpy(), y.numpy())
    part = torch.utils.data.Subset(torch.utils.data.TensorDataset(x, y), [4, 1])
    equal(as_source(part, "training"), x.numpy()[[4, 1]], y.numpy()[[4, 1]])
    equal(as_source((x, y), "training"), x.numpy(), y.numpy())

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(x, y)])

    with pytest.raises(BadInputError, match="Endless for training"):
        as_source(Endless(), "training")


def test_a_tensorflow_dataset_gives_its_samples_if_it_has_an_end():
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices(ARRAYS).map(lambda x, y: (2 * x, y))
    source = as_source(dataset, "training")
    equal(source, 2 * ARRAYS[0], ARRAYS[1])
    assert isinstance(source, ArraySource)
    refused = {
        "no end": dataset.repeat(),
        "an unknown length": dataset.filter(lambda _, y: y > 2),
        "no samples": dataset.take(0),
        r"x of training sample 1 has shape \(2, 2\)": dataset.batch(4),
        "training sample 0 is ndarray, not a pair": dataset.map(lambda x, _: x),
    }
    for said, other in refused.items():
        with pytest.raises(BadInputError, match=said):
            as_source(other, "training")
    stated = dataset.filter(lambda _, y: y > 2).apply(tf.data.experimental.assert_cardinality(3))
    equal(as_source(stated, "training"), 2 * ARRAYS[0][3:], ARRAYS[1][3:])


def test_no_framework_is_imported_to_tell_kinds_apart():
    code = (
        "import sys, numpy; from hetctl.runtime.data.sources import as_source\n"
        "as_source((numpy.ones(3), numpy.ones(3)), 'training')\n"
        "print({'tensorflow', 'torch', 'PIL', 'hetctl.images'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_folder_of_images(folder):
    found = ImageFolder(folder, size=24)
    assert found.classes == ("cat", "dog")
    assert found.files == ("cat/1.png", "dog/a.JPEG", "dog/b.jpg")
    source = as_source(found, "training")
    assert [int(source.prepare(number)[1]) for number in range(3)] == [0, 1, 1]
    assert source.spec == SampleSpec((24, 24, 3), np.dtype("u1"), (), np.dtype("i8"))
    x, _ = source.prepare(1)
    assert x.std() > 0
    np.testing.assert_array_equal(source.prepare(1)[0], x)


def test_the_centre_is_kept_and_the_shorter_side_scaled(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((20, 60, 3), dtype=np.uint8)
    pixels[:, 20:40] = 200
    image.fromarray(pixels).save(tmp_path / "wide.png")
    image.fromarray(pixels).rotate(90, expand=True).save(tmp_path / "high.png")
    for name in ("wide.png", "high.png"):
        inner = decode_and_crop(10)(tmp_path / name)[1:-1, 1:-1]
        assert inner.shape == (8, 8, 3)
        assert (inner == 200).all()
    image.fromarray(pixels).convert("L").save(tmp_path / "grey.png")
    assert decode_and_crop(20)(tmp_path / "grey.png").shape == (20, 20, 3)


def test_an_image_of_another_shape_is_named(folder):
    source = as_source(ImageFolder(folder, prepare=lambda path: np.zeros(len(path.name))), "training")
    with pytest.raises(BadInputError, match=r"x of training sample 1 \(dog/a.JPEG\) has shape \(6,\)"):
        source.prepare(1)


def test_a_broken_image_is_named(folder):
    file = folder / "dog" / "b.jpg"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(TransientInputError, match=r"dog/b\.jpg cannot be decoded"):
        as_source(ImageFolder(folder), "training").prepare(2)


def test_useless_folders_are_refused(tmp_path):
    with pytest.raises(TransientInputError, match="no sub-folders"):
        ImageFolder(tmp_path)
    with pytest.raises(TransientInputError, match="nowhere cannot be read: No such file"):
        ImageFolder(tmp_path / "nowhere")
    (tmp_path / "cat").mkdir()
    with pytest.raises(TransientInputError, match="returned 0 training samples"):
        as_source(ImageFolder(tmp_path), "training")


def test_classes_are_those_of_training(folder, tmp_path_factory):
    validation = tmp_path_factory.mktemp("validation")
    (validation / "dog").mkdir()
    (validation / "dog" / "1.png").write_bytes((folder / "cat" / "1.png").read_bytes())
    with pytest.raises(TransientInputError, match="different classes: cat"):
        as_sources((ImageFolder(folder), ImageFolder(validation)))
    (validation / "cat").mkdir()
    as_sources((ImageFolder(folder), ImageFolder(validation)))


def test_pillow_is_asked_for_when_needed(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(TransientInputError, match="needs Pillow"):
        as_source(ImageFolder(folder), "training")


def test_crops_and_flips_take_every_place():
    array = np.arange(5 * 4 * 3).reshape(5, 4, 3)
    augment = random_crop_and_flip(3)
    seen = {augment(array, np.random.default_rng(seed)).tobytes() for seed in range(300)}
    crops = [array[top : top + 3, left : left + 3] for top in range(3) for left in range(2)]
    assert seen == {each.tobytes() for crop in crops for each in (crop, crop[:, ::-1])}
    with pytest.raises(BadInputError, match="no square of 6 pixels fits into an image of 5 by 4"):
        random_crop_and_flip(6)(array, np.random.default_rng(1))


def test_scaling_reaches_both_ends():
    scaled = scale(np.array([0, 51, 255], dtype=np.uint8))
    assert scaled.dtype == np.float32
    assert scaled.tolist() == [0.0, np.float32(0.2), 1.0]


def in_child(work):
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send(work()))
    process.start()
    result = ours.recv()
    process.join()
    return result


def test_the_random_part_depends_neither_on_order_nor_on_process(folder):
    augment = in_turn(random_crop_and_flip(16), scale)
    source = as_source(ImageFolder(folder, size=24, augment=augment), "training")

    def drawn(order):
        pairs = ((number, source.prepare(number)[0], sample_rng(7, 1, number)) for number in order)
        return {number: source.augment(x, rng).tobytes() for number, x, rng in pairs}

    expected = drawn([0, 1, 2])
    assert len(set(expected.values())) == 3
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2, 1]):
        assert in_child(lambda order=order: drawn(order)) == expected
    x = source.augment(source.prepare(0)[0], sample_rng(7, 1, 0))
    assert x.shape == (16, 16, 3)
    assert x.dtype == np.float32
    place = np.empty_like(x)
    assert source.augment(source.prepare(0)[0], sample_rng(7, 1, 0), place) is place
    assert np.array_equal(place, x)


def test_a_random_part_that_takes_no_place_is_not_given_one(folder):
    source = as_source(ImageFolder(folder, size=24, augment=lambda array, _rng: array + 1), "training")
    prepared, place = source.prepare(0)[0], np.zeros((24, 24, 3), np.uint8)
    assert np.array_equal(source.augment(prepared, sample_rng(7, 1, 0), place), prepared + 1)
    assert not place.any()
